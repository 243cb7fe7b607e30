"""Prints the plan of a submission: `python -m jobs.submit SWEEP --dry-run`."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table as Grid

from jobs.block import Block
from jobs.command_line.plain_console import plain_console
from jobs.formatting import counted, format_number, relative
from jobs.launch.packing import worst_case_gpu_hours
from jobs.launch.plan_submission import Prepared
from jobs.results.latest import LOGS, folders_in
from jobs.results.manifest import Executor
from jobs.results.record import Record
from jobs.results.record_reader import iter_records
from jobs.results.unreadable import UnreadableResults
from jobs.run import Run, varying

SHOWN_RUNS = 10
console = plain_console()


def show_plan(
    prepared: Prepared, executor: Executor, cluster_file: Path | None, sbatch: bool
) -> None:
    """Print the plan of a submission: runs, jobs, job arrays, expected time and GPU-hours.

    Args:
        prepared: the planned submission.
        executor: where the jobs would run.
        cluster_file: path of the file with the settings of the cluster, or None.
        sbatch: whether to print the sbatch scripts.
    """
    manifest, expansion = prepared.manifest, prepared.expansion
    tasks = sum(len(job.tasks) for job in manifest.jobs)
    grid = Grid.grid(padding=(0, 2))
    repeats = manifest.sweep.repeats
    benchmarks = dict.fromkeys(run.benchmark for run in expansion.runs)
    left_out = [
        f"{count} {what}"
        for count, what in (
            (expansion.excluded, "excluded"),
            (expansion.filtered, "filtered out"),
            (expansion.duplicates, "duplicates"),
        )
        if count
    ]
    runs = f"{len(expansion.runs)}" + (f" x {repeats} repeats" if repeats > 1 else "")
    if expansion.blocks:
        paired = sum(len(block.all_tasks()) for block in expansion.blocks)
        alone = len(expansion.runs) - sum(len(block.runs) for block in expansion.blocks)
        runs += f", {counted(paired + alone, 'process')} (rounds and A/A)"
    largest = max((len(job.tasks) for job in manifest.jobs), default=0)
    per_job = f"with at most {counted(largest, 'run')} each"
    if manifest.sweep.runs_per_job is None:
        per_job += " (chosen automatically; runs_per_job sets it)"
    rows = [
        ("sweep", f"{manifest.sweep.name} ({', '.join(benchmarks)})"),
        ("runs", runs + (f" ({', '.join(left_out)})" if left_out else "")),
        (
            "to run",
            f"{tasks} ({_known_text(prepared)}, {len(prepared.in_flight)} queued or running)",
        ),
        ("jobs", f"{len(manifest.jobs)}, {per_job}"),
    ]
    if executor is Executor.slurm or sbatch:
        from jobs.launch.slurm_executor import arrays, max_array_size

        rows.append(("arrays", str(len(arrays(manifest, max_array_size())))))
        # Without the file, the jobs go to the default partition, which often has no GPUs.
        from_file = f"settings of {cluster_file}" if cluster_file else "no cluster.yaml here"
        rows.append(("cluster", from_file))
    durations = _durations(prepared)
    if expansion.blocks:
        rows.append(("paired", _rounds(expansion.blocks, prepared, durations)))
    for name, checkout in manifest.checkouts.items():
        commit = checkout.state.get("commit")
        rows.append(("against", f"{name}" + (f" (commit {commit})" if commit else "")))
    rows += [
        ("expected", _expected(prepared, durations)),
        ("at most", f"{worst_case_gpu_hours(manifest.jobs):.1f} GPU-hours, not counting requeues"),
        ("results", str(relative(manifest.folder))),
    ]
    for row in rows:
        grid.add_row(*row)
    console.print(grid, highlight=False)
    shapes = Counter(job.shape for job in manifest.jobs)
    for shape, count in shapes.items():
        text = f"  {counted(count, 'job')} of {shape}"
        if executor is Executor.slurm or sbatch:  # only Slurm limits the time of a whole job
            limit = max(job.timeout_min for job in manifest.jobs if job.shape == shape)
            text += f", at most {limit} min each"
        console.print(text, highlight=False)
    names = varying(expansion.runs)
    to_run = list(dict.fromkeys(run for job in manifest.jobs for run, _ in job.tasks))
    for run in to_run[:SHOWN_RUNS]:
        text = f"  {run}  {manifest.runs[run].label(names)}"
        console.print(text, highlight=False, soft_wrap=True)
    if len(to_run) > SHOWN_RUNS:
        console.print(f"  … and {len(to_run) - SHOWN_RUNS} more")
    if sbatch:
        from jobs.launch.slurm_executor import sbatch_texts

        for text in sbatch_texts(manifest):
            print(text)


def _known_text(prepared: Prepared) -> str:
    """Return how many runs are skipped because they succeeded or failed before."""
    failed = Counter(str(record.status) for record in prepared.failed_before)
    text = f"{len(prepared.done) - failed.total()} done"
    if failed:
        kinds = ", ".join(f"{count} {status}" for status, count in failed.items())
        text += f", {failed.total()} failed before: {kinds}; --retry-failed repeats them"
    return text


@dataclass(frozen=True)
class _Durations:
    """Run times of earlier runs with the same benchmarks and parameters that ended as ok."""

    seconds: dict[str, float]  # by benchmark and parameters, see `_point`
    source: str  # the results folder in which most of them were found

    def expected(self, runs: list[Run]) -> _Expected | None:
        """Return the expected time of some runs, each of which may occur several times.

        A run without an earlier time counts as the mean of the others. None if no run has one.
        """
        known = [self.seconds[point] for run in runs if (point := _point(run)) in self.seconds]
        if not known:
            return None
        mean = sum(known) / len(known)
        minutes = [self.seconds.get(_point(run), mean) / 60 for run in runs]
        gpus = [run.shape.nodes * run.shape.gpus_per_node for run in runs]
        used = sum(one * count / 60 for one, count in zip(minutes, gpus, strict=True))
        return _Expected(sum(minutes), used, len(known))


@dataclass(frozen=True)
class _Expected:
    """The expected time of some runs that are executed one after another."""

    minutes: float
    gpu_hours: float
    known: int  # number of runs with an earlier time

    @property
    def gpu_text(self) -> str:
        """The GPU-hours with a comma before them. Empty if the runs need no GPUs."""
        return f", {format_number(self.gpu_hours, 2)} GPU-hours" if self.gpu_hours else ""


def _durations(prepared: Prepared) -> _Durations:
    """Read how long the runs of a planned submission took before.

    The records are read from the results folder and from the results folders in ./logs that have
    the name of the sweep, as the reference results of this repository. The time of a run is the
    mean in the first of these folders that has records of it. In a block, the first round takes
    longer than the others.
    """
    manifest = prepared.manifest
    took: dict[str, float] = {}
    source = ""
    folders = [manifest.folder]
    with suppress(UnreadableResults):
        folders += [path for path in folders_in(LOGS) if path.name == manifest.sweep.name]
    for folder in dict.fromkeys(path.resolve() for path in folders):
        here: dict[str, list[float]] = {}
        with suppress(UnreadableResults):  # another folder must not stop the submission
            for record in iter_records(folder) if manifest.jobs else ():
                if isinstance(record, Record) and record.status == "ok":
                    here.setdefault(_point(record), []).append(
                        record.finished_at - record.started_at
                    )
        source = source or (str(relative(folder)) if here else "")
        took = {point: sum(times) / len(times) for point, times in here.items()} | took
    return _Durations(took, source)


def _expected(prepared: Prepared, durations: _Durations) -> str:
    """Return an estimate of the total run time of a planned submission, as text."""
    manifest = prepared.manifest
    wanted = [manifest.runs[run] for job in manifest.jobs for run, _ in job.tasks]
    if not wanted:
        return "nothing to run"
    expected = durations.expected(wanted)
    if expected is None:
        return "unknown: these runs have no earlier records"
    return (
        f"{time_text(expected.minutes)} of run time{expected.gpu_text} (from records of "
        f"{expected.known} of {len(wanted)} runs in {durations.source})"
    )


def _rounds(blocks: list[Block], prepared: Prepared, durations: _Durations) -> str:
    """Return the number of blocks and rounds, and the expected time of a round, as text.

    Args:
        blocks: the blocks of the sweep, at least one.
        prepared: the planned submission.
        durations: run times of earlier runs.
    """
    rounds = max(block.rounds for block in blocks)
    text = f"{counted(len(blocks), 'block')} of {counted(rounds, 'round')}"
    runs = [prepared.manifest.runs[run] for block in blocks for run, _ in block.tasks(0)]
    expected = durations.expected(runs)
    each = f"{len(runs)} processes a round"
    if expected is None:
        return f"{text}, {each}"
    return f"{text}, {each}, about {time_text(expected.minutes)}{expected.gpu_text} a round"


def time_text(minutes: float) -> str:
    """Return a time as text, in seconds if it is below one minute."""
    return (
        f"{minutes * 60:.0f} s" if minutes < 1 else f"{minutes:.{0 if minutes >= 10 else 1}f} min"
    )


def _point(of: Run | Record) -> str:
    """Return a key that is equal for runs and records with the same benchmark and parameters.

    The key is used to estimate run times. It does not contain the version of the benchmark, because
    a new version hardly changes the run time.
    """
    return json.dumps([of.benchmark, of.params], sort_keys=True)
