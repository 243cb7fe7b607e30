"""Finds the rounds of a block that are complete, from records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable

from jobs.block import Block, TaskKey
from jobs.results.record import Record

# Number of executions after which a round counts as complete although a GPU was throttled in each.
MAX_EXECUTIONS = 3
# Names in `jobs.provenance.THROTTLE_REASONS`.
DISTURBANCES = ("hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake")


def complete_rounds(
    block: Block,
    records: Iterable[Record],
    counts: Callable[[Record], bool],
    disturbed: Callable[[Record], bool],
    left_out: Collection[TaskKey] = (),
) -> set[int]:
    """Return the rounds of a block that need not be executed again.

    A round is complete if one execution of it has a valid record of each of its runs. Records of
    different executions are not put together, because the runs would then not be paired.

    Args:
        block: the block.
        records: records in the results folder.
        counts: whether a record is a valid result of its run.
        disturbed: whether the conditions of a record were not those of an undisturbed GPU. The
            round is executed again, but not more than MAX_EXECUTIONS times.
        left_out: (run id, repeat) pairs that a complete round need not contain.
    """
    executed: dict[tuple[int, str], set[TaskKey]] = {}
    bad: set[tuple[int, str]] = set()
    for record in records:
        if record.block is None or record.block.id != block.id or not counts(record):
            continue
        key = record.block.round, record.block.execution
        executed.setdefault(key, set()).add((record.run, record.repeat))
        if disturbed(record):
            bad.add(key)
    whole = [
        key
        for key, tasks in executed.items()
        if tasks.issuperset(task for task in block.tasks(key[0]) if task not in left_out)
    ]
    tries = Counter(round for round, _ in whole)
    complete = {key[0] for key in whole if key not in bad or tries[key[0]] >= MAX_EXECUTIONS}
    empty = {n for n in range(block.rounds) if left_out and set(block.tasks(n)) <= set(left_out)}
    return complete | empty


def throttled(record: Record) -> bool:
    """Return whether a GPU was slowed down by its temperature or its hardware during a run.

    The power limit does not count. It is a property of the GPU, not a disturbance.
    """
    return any(
        reason in DISTURBANCES
        for phase in record.conditions.values()
        for reason in phase.get("throttle", ())
    )
