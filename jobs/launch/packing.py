"""Group runs that need the same resources into jobs, and compute the time limit of each job."""

from __future__ import annotations

import math

from jobs.launch.resume import Task
from jobs.results.manifest import Job
from jobs.run import Shape

STARTUP_MIN = 2  # time for imports and slow file systems, added to the timeouts, in minutes


def pack(tasks: list[Task], runs_per_job: int) -> list[Job]:
    """Group (run, repeat) pairs into jobs.

    All runs of a job have the same resources and launch settings (`Shape`). The order of the pairs
    is kept.

    Args:
        tasks: the (run, repeat) pairs to execute.
        runs_per_job: maximum number of pairs in a job.
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

    The limit is `shape.timeout_min`, if it is set. Otherwise it is the sum of the timeouts of the
    job's runs, plus a few minutes for the start (STARTUP_MIN).

    Args:
        shape: resources and launch settings of the job.
        timeouts_s: timeout of each run of the job, in seconds.
    """
    return shape.timeout_min or math.ceil(sum(timeouts_s) / 60) + STARTUP_MIN


def worst_case_gpu_hours(jobs: list[Job]) -> float:
    """Return the GPU-hours of the jobs if each job uses its full time limit."""
    return sum(j.timeout_min / 60 * j.shape.nodes * j.shape.gpus_per_node for j in jobs)
