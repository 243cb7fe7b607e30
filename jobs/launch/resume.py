"""Decide which runs a submission executes and which it skips because of earlier records."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jobs.results.record import Record
from jobs.run import Run
from jobs.status import Status
from jobs.sweep.expand import Expansion

Task = tuple[Run, int]  # (run, repeat)


def tasks_of(expansion: Expansion, repeats: int) -> list[Task]:
    """Return all (run, repeat) pairs, ordered by repeat first.

    All runs execute once before any executes a second time, so slow drift of the machine affects
    all runs alike.
    """
    return [(run, repeat) for repeat in range(repeats) for run in expansion.runs]


def split_done(
    tasks: list[Task],
    records: Iterable[Record],
    same_device: Callable[[Record, Run], bool],
    retry_failed: bool = False,
    force: bool = False,
) -> tuple[list[Task], list[Task]]:
    """Split tasks into those to execute and those that are done.

    A task is done if an attempt on the same kind of device was ok, or if its latest attempt there
    was unsupported or failed. Failed means oom, timeout, error or wrong, and does not count as done
    with `retry_failed`. Killed, preempted and cancelled attempts never count as done.

    Args:
        tasks: all (run, repeat) pairs of the sweep.
        records: records of earlier attempts.
        same_device: whether a record comes from the kind of device on which the run would now
            execute. Other records are ignored.
        retry_failed: execute failed tasks again.
        force: execute all tasks.

    Returns:
        The tasks to execute, and the tasks that are done.
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
        again = last.runs_again_on_submit or (retry_failed and last.runs_again_on_retry)
        finished = not again or any(r.status is Status.ok for r in attempts)
        (done if finished else todo).append((run, repeat))
    return todo, done
