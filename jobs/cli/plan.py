"""Prints the plan of a submission: `python -m jobs.submit SWEEP --dry-run`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from shutil import which

from rich.table import Table as Grid

from jobs.block import Block
from jobs.cli.consoles import console
from jobs.formatting import counted, relative
from jobs.launch.expected_time import EarlierTimes, expected_text
from jobs.launch.packing import worst_case_gpu_hours
from jobs.launch.plan_submission import Prepared
from jobs.results.manifest import Executor
from jobs.run import varying

SHOWN_RUNS = 10


def show_plan(
    prepared: Prepared, executor: Executor, cluster_file: Path | None, sbatch: bool
) -> None:
    """Print the plan of a submission: runs, jobs, job arrays, expected time and GPU-hours.

    Args:
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
            f"{tasks} ({_known_text(prepared)}, {len(prepared.in_flight)} queued or running"
            + (f", of these {prepared.unknown} unknown)" if prepared.unknown else ")"),
        ),
        ("jobs", f"{len(manifest.jobs)}, {per_job}"),
    ]
    if executor is Executor.slurm or sbatch:
        from jobs.launch.slurm_executor import planned_arrays

        planned, problem = planned_arrays(manifest)
        rows.append(("arrays", str(len(planned))))
        if problem and which("sbatch"):
            rows.append(("Slurm", problem))
        # Without the file, the jobs go to the default partition, which often has no GPUs.
        from_file = f"settings of {cluster_file}" if cluster_file else "no cluster.yaml here"
        rows.append(("cluster", from_file))
    earlier = EarlierTimes.of(prepared)
    if expansion.blocks:
        rows.append(("paired", _rounds(expansion.blocks, prepared, earlier)))
    for name, checkout in manifest.checkouts.items():
        commit = checkout.state.get("commit")
        rows.append(("against", f"{name}" + (f" (commit {commit})" if commit else "")))
    rows += [
        ("expected", expected_text(prepared, earlier)),
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


def _rounds(blocks: list[Block], prepared: Prepared, earlier: EarlierTimes) -> str:
    """Return the number of blocks and rounds, and the expected time of a round, as text.

    There must be at least one block.
    """
    rounds = max(block.rounds for block in blocks)
    fewest = "3 to " if any(block.auto for block in blocks) else ""
    text = f"{counted(len(blocks), 'block')} of {fewest}{counted(rounds, 'round')}"
    runs = [prepared.manifest.runs[run] for block in blocks for run, _ in block.tasks(0)]
    expected = earlier.expected(runs)
    each = f"{len(runs)} processes a round"
    if expected is None:
        return f"{text}, {each}"
    return f"{text}, {each}, about {expected.time_text}{expected.gpu_text} a round"
