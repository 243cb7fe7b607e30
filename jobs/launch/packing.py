"""Group runs that need the same resources into jobs, and compute the time limits of the jobs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from jobs.block import FEWEST_ROUNDS, Block, TaskKey, in_blocks, trial_runs
from jobs.results.manifest import Job
from jobs.run import Run, Shape

STARTUP_MIN = 2  # time for imports and slow file systems, added to the timeouts, in minutes
# Number of jobs per slot of the local queue, if the queue has several slots. With one, the other
# slots would be idle while the slowest job runs.
JOBS_PER_SLOT = 4
SLACK = 1.5  # time that runs may take, relative to earlier times
_Group = tuple[Block | None, list[TaskKey]]  # from `in_blocks`


def pack(
    tasks: list[TaskKey],
    runs: Mapping[str, Run],
    runs_per_job: int | None,
    slots: Callable[[Shape], int] | None = None,
    blocks: Sequence[Block] = (),
    earlier_s: Mapping[str, float] = MappingProxyType({}),
) -> list[Job]:
    """Group tasks into jobs of the same `Shape`, in their order.

    The tasks of a block are in one job, so that they are executed in one allocation. All jobs of a
    `Shape` have the time limit of the longest one, because Slurm has one for all jobs of an array.

    Args:
        runs_per_job: maximum number of tasks in a job, unless a single block has more. None: chosen
            for each `Shape`, from `slots`.
        slots: how many jobs of a `Shape` run at the same time. None: unknown, as on a cluster. If
            both are None, each task or block is a separate job. 0: none can run, and one job
            records all tasks as unsupported.
        earlier_s: run times of earlier runs in seconds, by run id.
    """
    by_shape: dict[Shape, list[_Group]] = {}
    for block, members in in_blocks(tasks, blocks):
        by_shape.setdefault(runs[members[0][0]].shape, []).append((block, members))
    jobs: list[Job] = []
    for shape, groups in by_shape.items():
        count = sum(len(members) for _, members in groups)
        at_once = slots(shape) if slots else None
        size = count if at_once == 0 else runs_per_job or _chosen_size(count, at_once)
        chunks = list(_chunks(groups, size))
        longest_s = max(
            sum(_allowed_s(*group, runs, earlier_s) for group in chunk) for chunk in chunks
        )
        minutes = shape.timeout_min or math.ceil(longest_s / 60) + STARTUP_MIN
        for chunk in chunks:
            together = [task for _, members in chunk for task in members]
            jobs.append(Job(len(jobs), shape, minutes, together))
    return jobs


def _allowed_s(
    block: Block | None,
    tasks: list[TaskKey],
    runs: Mapping[str, Run],
    earlier_s: Mapping[str, float],
) -> float:
    """Return the time that the tasks of one block, or a single task, may take, in seconds.

    It is the sum of the timeouts, with those of the trial. If the worker chooses the number of
    rounds, it comes from earlier times, or is that of the trial and the fewest rounds: the worker
    stops in time, and the next submission continues the block.
    """
    executed = [run for run, _ in tasks]
    executed += trial_runs(tasks, [block] if block is not None else [])
    worst = sum(runs[run].timeout_s for run in executed)
    if block is None or not block.auto:
        return worst
    if all(run in earlier_s for run in executed):
        longest = max(runs[run].timeout_s for run in executed)
        return min(worst, SLACK * sum(earlier_s[run] for run in executed) + longest)
    fewest = [run for n in range(FEWEST_ROUNDS) for run, _ in block.tasks(n)]
    return min(worst, sum(runs[run].timeout_s for run in (*fewest, *block.runs)))


def _chunks(groups: list[_Group], size: int) -> Iterator[list[_Group]]:
    """Yield consecutive groups together, as long as they have at most `size` tasks."""
    chunk: list[_Group] = []
    count = 0
    for group in groups:
        if chunk and count + len(group[1]) > size:
            yield chunk
            chunk, count = [], 0
        chunk.append(group)
        count += len(group[1])
    if chunk:
        yield chunk


def _chosen_size(count: int, slots: int | None) -> int:
    """Return the maximum number of tasks in a job, of `count` tasks with the same `Shape`."""
    if slots is None:
        return 1
    # Each job starts a worker, which imports torch. This can take longer than a short run.
    return count if slots == 1 else math.ceil(count / (JOBS_PER_SLOT * slots))


def local_slots(shape: Shape, gpus: int, parallel: int | None) -> int:
    """Return how many jobs of a `Shape` the local queue runs at once, on a machine with GPUs."""
    if not is_possible(shape, gpus):
        return 0
    most = most_at_once(shape, gpus, parallel)
    return min(most, gpus // shape.gpus_per_node) if shape.gpus_per_node else most


def most_at_once(shape: Shape, gpus: int, parallel: int | None) -> int:
    """Return how many jobs the local queue runs at once while one of them has a `Shape`.

    Jobs beside one that has no GPUs would disturb its timings, so the user must allow them.
    """
    if shape.exclusive:
        return 1
    has_gpus = shape.gpus_per_node > 0 and is_possible(shape, gpus)
    return parallel or (gpus if has_gpus else 1)


def is_possible(shape: Shape, gpus: int) -> bool:
    """Return whether one machine with some GPUs can run a job of a `Shape`."""
    return shape.gpus_per_node <= gpus and shape.nodes == 1


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
    return sum(job.timeout_min / 60 * job.shape.gpus for job in jobs)
