"""Runs -> jobs: leave out what is done, group by launch shape, pack."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from jobs.results.manifest import Job
from jobs.results.record import Record
from jobs.run import Run, Shape
from jobs.status import Status
from jobs.sweep.expand import Expansion

Task = tuple[Run, int]
STARTUP_MIN = 2  # minutes a job gets on top of its runs' timeouts: imports, a slow file system


def tasks_of(expansion: Expansion, repeats: int) -> list[Task]:
    """Every (run, repeat); all runs once before any a second time, so that drift is spread."""
    return [(run, repeat) for repeat in range(repeats) for run in expansion.runs]


def split_done(
    tasks: list[Task],
    records: Iterable[Record],
    same_device: Callable[[Record, Run], bool],
    retry_failed: bool = False,
    force: bool = False,
) -> tuple[list[Task], list[Task]]:
    """What is to run, and what need not.

    A task is done where an attempt on the same kind of device was ok, or where its latest attempt
    there ended for good: failed (unless `retry_failed`) or unsupported.
    """
    if force:
        return list(tasks), []
    history: dict[tuple[str, int], list[Record]] = {}
    for record in records:
        history.setdefault((record.run, record.repeat), []).append(record)
    todo: list[Task] = []
    done: list[Task] = []
    for run, repeat in tasks:
        attempts = [r for r in history.get((run.id, repeat), []) if same_device(r, run)]
        attempts.sort(key=lambda record: record.finished_at)
        last = attempts[-1].status if attempts else Status.missing
        again = not attempts or last.resumes or (retry_failed and last.retries)
        finished = not again or any(r.status is Status.ok for r in attempts)
        (done if finished else todo).append((run, repeat))
    return todo, done


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
