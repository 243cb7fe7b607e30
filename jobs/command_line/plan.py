"""Prints the plan of a submission: `python -m jobs.submit SWEEP --dry-run`."""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress

from rich.table import Table as Grid

from jobs.command_line.plain_console import plain_console
from jobs.formatting import counted, relative
from jobs.launch.packing import worst_case_gpu_hours
from jobs.launch.submission import Prepared
from jobs.results.latest import LOGS, folders_in
from jobs.results.manifest import Executor
from jobs.results.record import Record
from jobs.results.record_reader import iter_records
from jobs.results.unreadable import UnreadableResults
from jobs.run import Run, varying

SHOWN_RUNS = 10
console = plain_console()


def show_plan(prepared: Prepared, executor: Executor, sbatch: bool) -> None:
    """Print the plan of a submission: runs, jobs, job arrays, expected time and GPU-hours."""
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
    largest = manifest.sweep.runs_per_job or max(
        (len(job.tasks) for job in manifest.jobs), default=1
    )
    per_job = f"with at most {counted(largest, 'run')} each"
    if manifest.sweep.runs_per_job is None:
        per_job += " (chosen automatically; runs_per_job sets it)"
    rows = [
        ("sweep", f"{manifest.sweep.name} ({', '.join(benchmarks)})"),
        ("runs", runs + (f" ({', '.join(left_out)})" if left_out else "")),
        (
            "to run",
            f"{tasks} ({len(prepared.done)} done, {len(prepared.in_flight)} queued or running)",
        ),
        ("jobs", f"{len(manifest.jobs)}, {per_job}"),
    ]
    if executor is Executor.slurm or sbatch:
        from jobs.launch.slurm_executor import arrays, max_array_size

        rows.append(("arrays", str(len(arrays(manifest, max_array_size())))))
    rows += [
        ("expected", _expected(prepared)),
        ("at most", f"{worst_case_gpu_hours(manifest.jobs):.1f} GPU-hours, not counting requeues"),
        ("results", str(relative(manifest.folder))),
    ]
    for row in rows:
        grid.add_row(*row)
    console.print(grid, highlight=False)
    shapes = Counter(job.shape for job in manifest.jobs)
    for shape, count in shapes.items():
        limit = max(job.timeout_min for job in manifest.jobs if job.shape == shape)
        jobs = counted(count, "job")
        console.print(f"  {jobs} of {shape}, at most {limit} min each", highlight=False)
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


def _expected(prepared: Prepared) -> str:
    """Return an estimate of the total run time of a planned submission, as text.

    The estimate uses the durations of earlier runs with the same benchmark and parameters that
    ended as ok. Their records are read from the results folder and from the results folders in
    ./logs that have the name of the sweep, as the reference results of this repository.
    """
    manifest = prepared.manifest
    took: dict[str, float] = {}
    source = ""
    folders = [manifest.folder]
    with suppress(UnreadableResults):
        folders += [path for path in folders_in(LOGS) if path.name == manifest.sweep.name]
    for folder in dict.fromkeys(path.resolve() for path in folders):
        with suppress(UnreadableResults):  # another folder must not stop the submission
            for record in iter_records(folder) if manifest.jobs else ():
                if isinstance(record, Record) and record.status == "ok":
                    took.setdefault(_point(record), record.finished_at - record.started_at)
                    source = source or str(relative(folder))
    wanted = [_point(manifest.runs[run]) for job in manifest.jobs for run, _ in job.tasks]
    known = [took[run] for run in wanted if run in took]
    if not wanted:
        return "nothing to run"
    if not known:
        return "unknown: these runs have no earlier records"
    minutes = sum(known) / len(known) * len(wanted) / 60
    return (
        f"{minutes:.0f} min of run time (from records of {len(known)} of {len(wanted)} runs in "
        f"{source})"
    )


def _point(of: Run | Record) -> str:
    """Return a key that is equal for runs and records with the same benchmark and parameters.

    The key is used to estimate run times. It does not contain the version of the benchmark, because
    a new version hardly changes the run time.
    """
    return json.dumps([of.benchmark, of.params], sort_keys=True)
