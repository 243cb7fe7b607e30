"""Blocks: runs that are compared with each other, and are therefore measured in turn.

The speed of a GPU depends on its temperature, its power and its host, and changes within minutes.
Runs of a block are measured in one allocation, i.e. on the same GPUs of the same booted host, in
rounds. In each round, every run is executed once, in a process of its own. The baseline is executed
twice (A/A), about half a round apart, which shows how much the results of the same code differ.

Every second round has the reverse order of the one before, so that a steady change during the two
affects all runs equally. After two rounds the order is rotated: the first process of a round starts
from another state of the GPU than the others, and each process is first in turn.

Before the rounds, each run is executed once in a trial, whose times are thrown away, see
`jobs.worker.turns`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jobs.run import Run

TaskKey = tuple[str, int]  # run id, repeat
FEWEST_ROUNDS = 3  # of a block that is measured until it is decided


@dataclass(frozen=True)
class Block:
    """Runs that differ only in the parameters that a sweep compares, and how often they run."""

    id: str
    baseline: str  # run id
    runs: tuple[str, ...]  # all run ids, the baseline first
    rounds: int
    aa: bool  # whether the baseline is executed twice in each round
    sustained: tuple[str, ...] = ()  # ids of runs that are also measured over seconds
    auto: bool = False  # whether the worker stops as soon as all cells are decided
    trial: bool = False  # whether a trial comes before the rounds; False in older manifests

    def tasks(self, round: int) -> list[TaskKey]:
        """Return the tasks of a round in the order of execution.

        A run has one repeat per round. The baseline has two, if it is executed twice in a round.
        """
        first, *others = self.first_tasks(round)
        half = (len(others) + 1) // 2
        again = [(self.baseline, 2 * round + 1)] if self.aa else []
        order = [first, *others[:half], *again, *others[half:]]
        turn = 2 * (round // 2) % len(order)
        order = order[turn:] + order[:turn]
        return order[::-1] if round % 2 else order

    def first_tasks(self, round: int) -> list[TaskKey]:
        """Return each run once, the baseline first, with its first repeat in a round."""
        return [(run, 2 * round if self.is_twice(run) else round) for run in self.runs]

    def all_tasks(self) -> list[TaskKey]:
        return [task for round in range(self.rounds) for task in self.tasks(round)]

    def round_of(self, task: TaskKey) -> int:
        run, repeat = task
        return repeat // 2 if self.is_twice(run) else repeat

    def is_twice(self, run: str) -> bool:
        return self.aa and run == self.baseline


def in_blocks(
    tasks: Iterable[TaskKey], blocks: Iterable[Block]
) -> list[tuple[Block | None, list[TaskKey]]]:
    """Group the tasks of a job, in the order of execution: by block, or alone with None."""
    block_of = {run: block for block in blocks for run in block.runs}
    groups: dict[TaskKey | str, tuple[Block | None, list[TaskKey]]] = {}
    for task in tasks:
        block = block_of.get(task[0])
        _, members = groups.setdefault(task if block is None else block.id, (block, []))
        members.append(task)
    return list(groups.values())


def trial_runs(tasks: Iterable[TaskKey], blocks: Iterable[Block]) -> list[str]:
    """Return the ids of the runs that a job with these tasks executes in trials."""
    found = (block for block, _ in in_blocks(tasks, blocks) if block is not None and block.trial)
    return [run for block in found for run in block.runs]


def block_id(run: Run, interleaved: tuple[str, ...]) -> str:
    """Return the id of a run's block: a hash of all but the parameters that are compared."""
    shared: dict[str, Any] = {k: v for k, v in run.params.items() if k not in interleaved}
    text = json.dumps([run.benchmark, run.version, shared, sorted(interleaved)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
