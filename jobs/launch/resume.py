"""Decide which runs a submission executes and which it skips because of earlier records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from jobs.block import Block
from jobs.results.counting import complete_rounds, is_done, is_done_in_round
from jobs.results.record import Record
from jobs.run import Run

Task = tuple[Run, int]  # a run, and the index of its repeat


def tasks_of(runs: Sequence[Run], repeats: int) -> list[Task]:
    """Return all (run, repeat) pairs of some runs, sorted by repeat.

    Every run is executed once before any run is repeated. If the speed of the machine changes
    slowly, the change affects all runs equally.
    """
    return [(run, repeat) for repeat in range(repeats) for run in runs]


def split_done(
    tasks: list[Task],
    records: Iterable[Record],
    same_device: Callable[[Record, Run], bool],
    retry_failed: bool = False,
    force: bool = False,
) -> tuple[list[Task], list[Task]]:
    """Split (run, repeat) pairs into pairs to execute and pairs that are done.

    For when a pair is done, see `counting.is_done`. With `force`, none is.

    Args:
        same_device: whether a record comes from the kind of device on which the run will execute.
            Other records are ignored.
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
        (done if is_done(attempts, retry_failed) else todo).append((run, repeat))
    return todo, done


def split_rounds(
    blocks: Iterable[Block],
    runs: Mapping[str, Run],
    records: Iterable[Record],
    same_device: Callable[[Record, Run], bool],
    retry_failed: bool = False,
    force: bool = False,
    decided: Mapping[str, int] = MappingProxyType({}),
) -> tuple[list[list[Task]], list[Task]]:
    """Split the rounds of blocks into rounds to execute and rounds that are done.

    A round is done if all its (run, repeat) pairs are, in the latest whole execution of the round.
    Otherwise the whole round is executed again.

    Args:
        records: records of earlier attempts, also those of older code.
        same_device: as in `split_done`, and False for a record of older code.
        decided: numbers of rounds after which blocks were decided, by id. If a block has as many
            that are done, its others are left out.

    Returns:
        The pairs of each round to execute, and all pairs that are done.
    """

    def is_result(record: Record) -> bool:
        known = runs.get(record.run)  # None: the sweep does not have the run any more
        return (
            known is not None
            and same_device(record, known)
            and is_done_in_round(record, retry_failed)
        )

    of_block: dict[str, list[Record]] = {}
    for record in () if force else records:
        if record.block is not None:
            of_block.setdefault(record.block.id, []).append(record)
    todo: list[list[Task]] = []
    done: list[Task] = []
    for block in blocks:
        known = of_block.get(block.id, ())
        complete = complete_rounds(block, known, is_result)
        enough = block.id in decided and decided[block.id] <= len(complete)
        for round in range(block.rounds):
            pairs = [(runs[run], repeat) for run, repeat in block.tasks(round)]
            if round in complete:
                done += pairs
            elif not enough:
                todo.append(pairs)
    return todo, done
