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

    A round is complete if its latest whole execution on a kind of device has a valid record of each
    of its runs. Earlier executions do not count, because reports show the latest. Records of
    different executions are not put together, because the runs would then not be paired.

    Args:
        records: all records in the results folder, also those that do not count.
        counts: whether a record is a valid result of its run.
        disturbed: whether the conditions of a record were not those of an undisturbed GPU. The
            round is executed again, but not more than MAX_EXECUTIONS times.
        left_out: (run id, repeat) pairs that a complete round need not contain.
    """
    executed: dict[tuple[int, str], list[Record]] = {}
    for record in records:
        if record.block is not None and record.block.id == block.id:
            executed.setdefault((record.block.round, record.block.execution), []).append(record)
    latest: dict[tuple[int, str], tuple[float, bool, bool]] = {}  # by round and device
    tries: Counter[int] = Counter()
    for (number, _), members in executed.items():
        valid = [record for record in members if counts(record)]
        needed = {task for task in block.tasks(number) if task not in left_out}
        is_valid = needed <= {(record.run, record.repeat) for record in valid}
        has_all = needed <= {(record.run, record.repeat) for record in members}
        if not has_all and not _is_whole(members):
            continue
        tries[number] += is_valid
        key = number, members[0].device
        start = min(record.started_at for record in members)
        if key not in latest or start >= latest[key][0]:
            latest[key] = start, is_valid, any(map(disturbed, valid))
    complete = {
        number
        for (number, _), (_, is_valid, is_disturbed) in latest.items()
        if is_valid and (not is_disturbed or tries[number] >= MAX_EXECUTIONS)
    }
    empty = {n for n in range(block.rounds) if left_out and set(block.tasks(n)) <= set(left_out)}
    return complete | empty


def _is_whole(execution: list[Record]) -> bool:
    """Return whether an execution has a record of each of its runs, e.g. with another baseline."""
    places = [record.block for record in execution if record.block is not None]
    return len({place.position for place in places}) >= places[0].size


def throttled(record: Record) -> bool:
    """Return whether a GPU was slowed down by its temperature or its hardware during a run.

    The power limit does not count. It is a property of the GPU, not a disturbance.
    """
    return any(
        reason in DISTURBANCES
        for phase in record.conditions.values()
        for reason in phase.get("throttle", ())
    )
