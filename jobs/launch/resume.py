"""Decide which runs a submission executes and which it skips because of earlier records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from jobs.block import Block, TaskKey
from jobs.results.counting import complete_rounds, is_done, is_done_in_round
from jobs.results.record import Record

# Whether a record is from the code and the kind of device with which its run will execute.
Counts = Callable[[Record], bool]


def split_done(
    tasks: list[TaskKey], records: Iterable[Record], counts: Counts, retry_failed: bool = False
) -> tuple[list[TaskKey], list[TaskKey]]:
    """Split tasks into those to execute and those that are done, see `counting.is_done`."""
    history: dict[TaskKey, list[Record]] = {}
    for record in filter(counts, records):
        history.setdefault((record.run, record.repeat), []).append(record)
    todo: list[TaskKey] = []
    done: list[TaskKey] = []
    for task in tasks:
        attempts = sorted(history.get(task, []), key=lambda record: record.finished_at)
        (done if is_done(attempts, retry_failed) else todo).append(task)
    return todo, done


def split_rounds(
    blocks: Iterable[Block],
    records: Iterable[Record],
    counts: Counts,
    retry_failed: bool,
    decided: Mapping[str, int],
) -> tuple[list[list[TaskKey]], list[TaskKey]]:
    """Split the rounds of blocks into those to execute, and the tasks of those that are done.

    A round is done if all its tasks are, in the latest whole execution of the round. Otherwise the
    whole round is executed again. `decided` has the numbers of rounds after which blocks were
    decided, by id. If a block has as many that are done, its others are left out.
    """
    of_block: dict[str, list[Record]] = {}
    for record in records:
        if record.block is not None:
            of_block.setdefault(record.block.id, []).append(record)
    todo: list[list[TaskKey]] = []
    done: list[TaskKey] = []
    for block in blocks:
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
    return todo, done
