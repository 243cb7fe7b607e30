"""Decide which tasks a submission executes, and which it skips as done, queued or running."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jobs.block import Block, TaskKey
from jobs.results.counting import complete_rounds, is_done, is_done_in_round
from jobs.results.record import Record

# Whether a record is from the code and the kind of device with which its run will execute.
Counts = Callable[[Record], bool]


def split(
    alone: list[TaskKey],
    blocks: list[Block],
    records: list[Record],
    counts: Counts,
    live: set[TaskKey],
    decided: Mapping[str, int],
    retry_failed: bool,
) -> tuple[list[list[TaskKey]], list[TaskKey], set[TaskKey]]:
    """Return the tasks to execute, those that are done, and those in flight.

    Tasks to execute are in lists of those that are executed together: one task that is `alone`, or
    a round of a block. A round is done if all its tasks are, in its latest whole execution. A block
    with a task in flight is not executed.

    Args:
        records: of earlier submissions, oldest first; those of which `counts` is true can make a
            task done.
        live: the tasks that are queued or running.
        decided: after how many rounds blocks were decided, by id. If a block has as many that are
            done, its others are left out.
    """
    attempts: dict[TaskKey, list[Record]] = {}
    of_block: dict[str, list[Record]] = {}
    for record in records:
        if counts(record):
            attempts.setdefault((record.run, record.repeat), []).append(record)
        if record.block is not None:
            of_block.setdefault(record.block.id, []).append(record)
    todo: list[list[TaskKey]] = []
    done: list[TaskKey] = []
    in_flight = live.intersection(alone)
    for task in alone:
        if is_done(attempts.get(task, []), retry_failed):
            done.append(task)
        elif task not in live:
            todo.append([task])
    for block in blocks:
        if not live.isdisjoint(block.all_tasks()):
            in_flight.update(block.all_tasks())
            continue
        complete = complete_rounds(
            block,
            of_block.get(block.id, ()),
            lambda record: counts(record) and is_done_in_round(record, retry_failed),
        )
        enough = block.id in decided and decided[block.id] <= len(complete)
        for round in range(block.rounds):
            if round in complete:
                done += block.tasks(round)
            elif not enough:
                todo.append(block.tasks(round))
    return todo, done, in_flight
