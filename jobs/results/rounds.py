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

    A round is complete if its latest execution has a valid record of each of its runs. Records of
    different executions are not put together, because the runs would then not be paired. An earlier
    execution does not count, because reports show the latest. An execution that was cut short is
    ignored.

    Args:
        block: the block.
        records: all records in the results folder, also those that do not count.
        counts: whether a record is a valid result of its run.
        disturbed: whether the conditions of a record were not those of an undisturbed GPU. The
            round is executed again, but not more than MAX_EXECUTIONS times.
        left_out: (run id, repeat) pairs that a complete round need not contain.
    """
    executed: dict[tuple[int, str], set[TaskKey]] = {}
    bad: set[tuple[int, str]] = set()
    of_block = [r for r in records if r.block is not None and r.block.id == block.id]
    latest = _latest_executions(of_block)
    for record in of_block:
        assert record.block is not None
        if not counts(record):
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
    complete = {
        round
        for round, execution in whole
        if execution == latest.get(round)
        and ((round, execution) not in bad or tries[round] >= MAX_EXECUTIONS)
    }
    empty = {n for n in range(block.rounds) if left_out and set(block.tasks(n)) <= set(left_out)}
    return complete | empty


def _latest_executions(records: Iterable[Record]) -> dict[int, str]:
    """Return the latest execution of each round of a block that was not cut short."""
    positions: dict[tuple[int, str], set[int]] = {}
    started: dict[tuple[int, str], float] = {}
    sizes: dict[tuple[int, str], int] = {}
    for record in records:
        assert record.block is not None
        key = record.block.round, record.block.execution
        positions.setdefault(key, set()).add(record.block.position)
        started[key] = min(started.get(key, record.started_at), record.started_at)
        sizes[key] = record.block.size
    whole = [key for key, found in positions.items() if len(found) >= sizes[key]]
    return dict(sorted(whole, key=lambda key: started[key]))


def throttled(record: Record) -> bool:
    """Return whether a GPU was slowed down by its temperature or its hardware during a run.

    The power limit does not count. It is a property of the GPU, not a disturbance.
    """
    return any(
        reason in DISTURBANCES
        for phase in record.conditions.values()
        for reason in phase.get("throttle", ())
    )
