"""Group runs into jobs of one shape, and compute the time limit of each job."""

from __future__ import annotations

import math

from jobs.launch.resume import Task
from jobs.results.manifest import Job
from jobs.run import Shape

STARTUP_MIN = 2  # added to the runs' timeouts, for imports and slow file systems, in minutes


def pack(tasks: list[Task], runs_per_job: int) -> list[Job]:
    """Group tasks into jobs. The tasks of a job have the same shape and keep their order.

    Args:
        tasks: the (run, repeat) pairs to execute.
        runs_per_job: maximum number of tasks in a job.
    """
    by_shape: dict[Shape, list[Task]] = {}
    for run, repeat in tasks:
        by_shape.setdefault(run.shape, []).append((run, repeat))
    jobs: list[Job] = []
    for shape, members in by_shape.items():
        for start in range(0, len(members), runs_per_job):
            chunk = members[start : start + runs_per_job]
            minutes = job_timeout_min(shape, [run.timeout_s for run, _ in chunk])
            jobs.append(Job(len(jobs), shape, minutes, [(run.id, repeat) for run, repeat in chunk]))
    return jobs


def job_timeout_min(shape: Shape, timeouts_s: list[float]) -> int:
    """Return the time limit of a job in minutes.

    Args:
        shape: shape of the job; its `timeout_min` takes precedence if set.
        timeouts_s: timeout of each task of the job, in seconds. Their sum, plus `STARTUP_MIN`, is
            the default limit.
    """
    return shape.timeout_min or math.ceil(sum(timeouts_s) / 60) + STARTUP_MIN


def worst_case_gpu_hours(jobs: list[Job]) -> float:
    """Return the GPU-hours that the jobs take if each one runs up to its time limit."""
    return sum(j.timeout_min / 60 * j.shape.nodes * j.shape.gpus_per_node for j in jobs)
