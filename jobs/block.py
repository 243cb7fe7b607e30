"""Blocks: runs that are compared with each other, and are therefore measured in turn.

The speed of a GPU depends on its temperature, its power and its host, and changes within minutes.
Runs of a block are measured in one allocation, i.e. on the same GPUs of the same booted host, in
rounds. In each round, every run of the block is executed once, in a process of its own. Every
second round has the reverse order, so that a steady change during the rounds affects all runs
equally. The baseline is executed twice in each round, first and last. The two results of the
baseline show how much the results of the same code differ.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jobs.run import Run

TaskKey = tuple[str, int]  # run id, repeat


@dataclass(frozen=True)
class Block:
    """Runs that differ only in the parameters that a sweep compares, and how often they run."""

    id: str
    baseline: str  # run id
    runs: tuple[str, ...]  # all run ids, the baseline first
    rounds: int
    aa: bool  # whether the baseline is executed twice in each round
    sustained: tuple[str, ...] = ()  # ids of runs that are also measured over seconds

    def tasks(self, round: int) -> list[TaskKey]:
        """Return the (run id, repeat) pairs of a round in the order of execution.

        A run has one repeat per round. The baseline has two, if it is executed twice in a round.
        """
        first, *others = self.runs
        if self.aa:
            order = [(first, 2 * round), *((run, round) for run in others), (first, 2 * round + 1)]
        else:
            order = [(first, round), *((run, round) for run in others)]
        return order[::-1] if round % 2 else order

    def all_tasks(self) -> list[TaskKey]:
        """Return the pairs of all rounds in the order of execution."""
        return [task for round in range(self.rounds) for task in self.tasks(round)]

    def round_of(self, task: TaskKey) -> int:
        """Return the round in which a (run id, repeat) pair is executed."""
        run, repeat = task
        return repeat // 2 if self.is_twice(run) else repeat

    def is_twice(self, run: str) -> bool:
        """Return whether a run is executed twice in each round."""
        return self.aa and run == self.baseline


def in_blocks(
    tasks: Iterable[TaskKey], blocks: Iterable[Block]
) -> list[tuple[Block | None, list[TaskKey]]]:
    """Group the (run id, repeat) pairs of a job, in the order of execution.

    Returns:
        Each block with all its pairs, and None with each pair that belongs to no block.
    """
    block_of = {run: block for block in blocks for run in block.runs}
    groups: list[tuple[Block | None, list[TaskKey]]] = []
    members: dict[str, list[TaskKey]] = {}
    for task in tasks:
        block = block_of.get(task[0])
        if block is None:
            groups.append((None, [task]))
        elif block.id in members:
            members[block.id].append(task)
        else:
            members[block.id] = [task]
            groups.append((block, members[block.id]))
    return groups


def block_id(run: Run, interleaved: tuple[str, ...]) -> str:
    """Return the id of a run's block: a hash, in 12 hexadecimal digits, of what is not compared.

    Parameters with the names `interleaved` are compared, the others not.
    """
    shared: dict[str, Any] = {k: v for k, v in run.params.items() if k not in interleaved}
    text = json.dumps([run.benchmark, run.version, shared, sorted(interleaved)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
