"""Prints the plan of a submission: the option --dry-run of `submit` and `retry`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from shutil import which

from jobs.block import Block
from jobs.cli.output import broken, columns
from jobs.code.short_names import run_labels
from jobs.formatting import counted, relative, tally
from jobs.launch.expected_time import EarlierTimes, expected_text
from jobs.launch.packing import worst_case_gpu_hours
from jobs.launch.plan_submission import Prepared
from jobs.results.manifest import Executor

SHOWN_RUNS = 10


def preview(prepared: Prepared, cluster: str, sbatch: bool) -> None:
    """Print the runs, jobs, job arrays, expected time and GPU-hours of a planned submission.

    `cluster` tells where Slurm's settings are from. With `sbatch`, the sbatch scripts are printed.
    """
    manifest = prepared.manifest
    on_slurm = manifest.executor is Executor.slurm or sbatch
    print(columns(_rows(prepared, cluster, on_slurm)), end="")
    shapes = Counter((job.shape, job.timeout_min) for job in manifest.jobs)
    for (shape, limit), count in shapes.items():
        text = f"  {counted(count, 'job')} of {shape}"
        if on_slurm:  # only Slurm limits the time of a whole job
            text += f", at most {limit} min each"
        print(broken(text, indent=4), end="")
    label = run_labels(prepared.expansion.runs)
    planned = dict.fromkeys(run for job in manifest.jobs for run, _ in job.tasks)
    for run in list(planned)[:SHOWN_RUNS]:
        print(f"  {run}  {label(manifest.runs[run])}")
    if len(planned) > SHOWN_RUNS:
        print(f"  … and {len(planned) - SHOWN_RUNS} more")
    if sbatch:
        from jobs.launch.slurm_executor import sbatch_texts

        for text in sbatch_texts(manifest):
            print(text)


def _rows(prepared: Prepared, cluster: str, on_slurm: bool) -> Iterator[tuple[str, str]]:
    """Yield what is planned, each with its name."""
    manifest, expansion = prepared.manifest, prepared.expansion
    benchmarks = dict.fromkeys(run.benchmark for run in expansion.runs)
    yield "sweep", f"{manifest.sweep.name} ({', '.join(benchmarks)})"
    yield "runs", _runs(prepared)
    tasks = sum(len(job.tasks) for job in manifest.jobs)
    unknown = f", of these {prepared.unknown} unknown" if prepared.unknown else ""
    in_flight = f"{len(prepared.in_flight)} queued or running{unknown}"
    yield "to run", f"{tasks} ({_known(prepared)}, {in_flight})"
    largest = max((len(job.tasks) for job in manifest.jobs), default=0)
    yield "jobs", f"{len(manifest.jobs)}, with at most {counted(largest, 'run')} each"
    if on_slurm:
        from jobs.launch.slurm_executor import planned_arrays

        planned, problem = planned_arrays(manifest)
        yield "arrays", str(len(planned))
        if problem and which("sbatch"):
            yield "Slurm", problem
        yield "cluster", cluster
    earlier = EarlierTimes.of(manifest)
    if expansion.blocks:
        yield "paired", _rounds(expansion.blocks, prepared, earlier)
    for name, checkout in manifest.checkouts.items():
        commit = checkout.state.get("commit")
        yield "against", f"{name}" + (f" (commit {commit})" if commit else "")
    yield "expected", expected_text(manifest, earlier)
    # Only Slurm ends a job at its time limit. Without hours, no run needs a GPU.
    if on_slurm and (hours := worst_case_gpu_hours(manifest.jobs)):
        yield "at most", f"{hours:.1f} GPU-hours, not counting requeues"
    yield "results", str(relative(manifest.folder))


def _runs(prepared: Prepared) -> str:
    """Return how many runs the sweep has, and how many are left out."""
    expansion, repeats = prepared.expansion, prepared.manifest.sweep.repeats
    text = f"{len(expansion.runs)}" + (f" x {repeats} repeats" if repeats > 1 else "")
    if expansion.blocks:
        paired = sum(len(block.all_tasks()) for block in expansion.blocks)
        alone = len(expansion.runs) - sum(len(block.runs) for block in expansion.blocks)
        text += f", {counted(paired + alone, 'process')} (rounds and A/A)"
    counts = {
        "excluded": expansion.excluded,
        "filtered out": expansion.filtered,
        "duplicates": expansion.duplicates,
    }
    left_out = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    return text + (f" ({left_out})" if left_out else "")


def _known(prepared: Prepared) -> str:
    """Return how many runs are skipped because they succeeded or failed before."""
    failed = prepared.failed_before
    text = f"{len(prepared.done) - len(failed)} done"
    if failed:
        statuses = tally(record.status for record in failed)
        text += f", {len(failed)} failed before: {statuses}; --retry-failed repeats them"
    return text


def _rounds(blocks: list[Block], prepared: Prepared, earlier: EarlierTimes) -> str:
    """Return the number of blocks and rounds, and the expected time of a round, as text."""
    rounds = max(block.rounds for block in blocks)
    fewest = "3 to " if any(block.auto for block in blocks) else ""
    text = f"{counted(len(blocks), 'block')} of {fewest}{counted(rounds, 'round')}"
    runs = [prepared.manifest.runs[run] for block in blocks for run, _ in block.tasks(0)]
    cost = earlier.cost(runs)
    text += f", {len(runs)} processes a round"
    return text if cost is None else f"{text}, about {cost} a round"
