"""Group runs that need the same resources into jobs, and compute the time limit of each job."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

from jobs.block import Block, TaskKey, in_blocks
from jobs.launch.resume import Task
from jobs.results.manifest import Job
from jobs.run import Run, Shape

STARTUP_MIN = 2  # time for imports and slow file systems, added to the timeouts, in minutes
# Number of jobs per slot of the local queue, if the queue has several slots. Some runs take longer
# than others. With one job per slot, the other slots would be idle while the slowest job runs.
JOBS_PER_SLOT = 4

Slots = Callable[[Shape], int]


def pack(
    tasks: list[Task],
    runs_per_job: int | None,
    slots: Slots | None = None,
    blocks: Iterable[Block] = (),
) -> list[Job]:
    """Group (run, repeat) pairs into jobs.

    All runs of a job have the same resources and launch settings (`Shape`). The order of the pairs
    is kept. The pairs of a block are in one job, so that they are executed in one allocation.

    Args:
        runs_per_job: maximum number of pairs in a job, unless a single block has more. None: chosen
            for each `Shape`, from `slots`.
        slots: function that returns how many jobs of a `Shape` run at the same time. None: unknown,
            as on a Slurm cluster. If both are None, each pair or block is a separate job.
    """
    runs = {run.id: run for run, _ in tasks}
    by_shape: dict[Shape, list[list[TaskKey]]] = {}
    for _, members in in_blocks(((run.id, repeat) for run, repeat in tasks), blocks):
        by_shape.setdefault(runs[members[0][0]].shape, []).append(members)
    jobs: list[Job] = []
    for shape, groups in by_shape.items():
        count = sum(map(len, groups))
        size = runs_per_job or _chosen_size(count, slots(shape) if slots else None)
        for chunk in _chunks(groups, size):
            minutes = job_timeout_min(shape, [runs[run].timeout_s for run, _ in chunk])
            jobs.append(Job(len(jobs), shape, minutes, chunk))
    return jobs


def _chunks(groups: list[list[TaskKey]], size: int) -> Iterator[list[TaskKey]]:
    """Yield consecutive groups together, as long as they have at most `size` pairs."""
    chunk: list[TaskKey] = []
    for group in groups:
        if chunk and len(chunk) + len(group) > size:
            yield chunk
            chunk = []
        chunk = chunk + group
    if chunk:
        yield chunk


def _chosen_size(count: int, slots: int | None) -> int:
    """Return the maximum number of pairs in a job, if the sweep does not set `runs_per_job`.

    Each job starts a worker, which imports torch. This can take longer than a short run. Jobs of
    the local queue therefore contain as many runs as possible. `count` is the number of pairs with
    the same `Shape`, and `slots` how many of their jobs run at the same time. None: unknown.
    """
    if slots is None:
        return 1
    return count if slots == 1 else math.ceil(count / (JOBS_PER_SLOT * slots))


def local_slots(gpus: int, parallel: int | None) -> Slots:
    """Return a function that returns how many jobs of a `Shape` the local queue runs at once.

    Args:
        parallel: maximum number of jobs at the same time. None: a job without GPUs runs alone.
    """

    def slots(shape: Shape) -> int:
        if shape.exclusive:
            return 1
        if not shape.gpus_per_node:
            return parallel or 1
        fit = max(1, gpus // shape.gpus_per_node)
        return fit if parallel is None else min(fit, parallel)

    return slots


def job_timeout_min(shape: Shape, timeouts_s: list[float]) -> int:
    """Return the time limit of a job in minutes.

    The limit is `shape.timeout_min`, if it is set. Otherwise it is the sum of the timeouts of the
    job's runs, plus a few minutes for the start (STARTUP_MIN).
    """
    return shape.timeout_min or math.ceil(sum(timeouts_s) / 60) + STARTUP_MIN


def too_short(jobs: list[Job], runs: dict[str, Run]) -> list[str]:
    """Return a note for each time limit that is shorter than the timeout of a run of the job."""
    timeouts: dict[int, float] = {}
    for job in jobs:
        longest = max(runs[run].timeout_s for run, _ in job.tasks)
        if job.shape.timeout_min and longest > job.timeout_min * 60:
            timeouts[job.timeout_min] = max(longest, timeouts.get(job.timeout_min, 0.0))
    return [
        f"resources.timeout_min is {limit} min, but timeout_s allows a run {longest:g} s; Slurm "
        "ends a run that reaches the limit of its job"
        for limit, longest in timeouts.items()
    ]


def worst_case_gpu_hours(jobs: list[Job]) -> float:
    """Return the GPU-hours of the jobs if each job uses its full time limit."""
    return sum(j.timeout_min / 60 * j.shape.nodes * j.shape.gpus_per_node for j in jobs)
