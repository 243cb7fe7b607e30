"""Which runs a submission leaves out: those that were measured, or that ended for good."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from jobs.results.record import Record
from jobs.run import Run
from jobs.status import Status
from jobs.sweep.expand import Expansion

Task = tuple[Run, int]


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
        again = last.runs_again_on_submit or (retry_failed and last.runs_again_on_retry)
        finished = not again or any(r.status is Status.ok for r in attempts)
        (done if finished else todo).append((run, repeat))
    return todo, done
