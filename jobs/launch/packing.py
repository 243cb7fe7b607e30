"""Runs -> jobs: grouped by launch shape, packed, with their time limits."""

from __future__ import annotations

import math

from jobs.launch.resume import Task
from jobs.results.manifest import Job
from jobs.run import Shape

STARTUP_MIN = 2  # minutes a job gets on top of its runs' timeouts: imports, a slow file system


def pack(tasks: list[Task], runs_per_job: int) -> list[Job]:
    """Jobs of at most `runs_per_job` tasks of one shape, in the order of the tasks."""
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
    """Minutes a job asks for: as given, else what its runs may take at worst."""
    return shape.timeout_min or math.ceil(sum(timeouts_s) / 60) + STARTUP_MIN


def worst_case_gpu_hours(jobs: list[Job]) -> float:
    """GPU-hours if every job took all the time it asks for."""
    return sum(j.timeout_min / 60 * j.shape.nodes * j.shape.gpus_per_node for j in jobs)
