"""The order in which a worker executes the runs of a block, and what each execution includes.

Before the first round that a worker executes, also one that continues a block, it executes each run
once in a trial. The trial checks the output, so that no round includes the check, and finds the
longest hold and the values that all rounds share. Its times are thrown away: its first process
starts from another state of the GPU, and its processes have holds of their own.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterable
from typing import Any

from jobs.block import Block, TaskKey
from jobs.results.counting import complete_executions, complete_rounds, is_trial
from jobs.results.manifest import Manifest
from jobs.results.record import BlockPlace, Record
from jobs.status import Status

# A run that ended so in one round would end so in the next. Other failures may be accidents.
_LASTING = (Status.unsupported, Status.wrong, Status.oom, Status.timeout)
IsResult = Callable[[Record], bool]


class Turns:
    """Plans the trial and the rounds of one block for a worker.

    Args:
        trial: whether the worker executes a trial.
    """

    def __init__(self, block: Block, manifest: Manifest, trial: bool):
        self._block = block
        self._trial = trial
        self._submission = manifest.id
        keys = manifest.sweep.blocks
        sustained = keys.sustained if keys is not None else None
        self._sustained_s = sustained.seconds if sustained is not None else 0.0
        self._since = time.time()

    def is_complete(
        self,
        round: int,
        records: Iterable[Record],
        is_result: IsResult,
        cancelled: Collection[TaskKey],
    ) -> bool:
        """Return whether a round need not be executed, see `complete_rounds`."""
        known = [r for r in self._own(records) if r.block and r.block.round == round]
        return round in complete_rounds(self._block, known, is_result, cancelled)

    def was_executed(self, round: int, records: Iterable[Record]) -> bool:
        """Return whether a round was executed as a whole, with any outcome."""
        own = [r for r in self._own(records) if r.block and r.block.round == round]
        return bool(complete_executions(own))

    def complete(
        self, records: Iterable[Record], is_result: IsResult, cancelled: Collection[TaskKey]
    ) -> int:
        """Return the number of rounds that need not be executed."""
        return len(complete_rounds(self._block, self._own(records), is_result, cancelled))

    def places(self, round: int) -> list[tuple[TaskKey, BlockPlace]]:
        """Return the (run id, repeat) pairs of a new execution of a round, in order."""
        return self._places(round, self._block.tasks(round))

    def trial_places(self, round: int) -> list[tuple[TaskKey, BlockPlace]]:
        """Return the (run id, repeat) pairs of the trial before a round, in order."""
        return self._places(round, self._block.first_tasks(round), trial=True)

    def _places(
        self, round: int, tasks: list[TaskKey], trial: bool = False
    ) -> list[tuple[TaskKey, BlockPlace]]:
        block, execution = self._block, uuid.uuid4().hex[:12]
        return [
            (
                task,
                BlockPlace(
                    id=block.id,
                    round=round,
                    execution=execution,
                    position=position,
                    size=len(tasks),
                    baseline=task[0] == block.baseline,
                    second=block.is_twice(task[0]) and task[1] % 2 == 1,
                    trial=trial,
                ),
            )
            for position, task in enumerate(tasks)
        ]

    def lasting_failure(self, run: str, records: Iterable[Record]) -> Record | None:
        """Return the record of a failure in this submission that would repeat, if there is one."""
        for record in self._own(records):
            mine = record.run == run and record.submission == self._submission
            if mine and record.status in _LASTING:
                return record
        return None

    def options(self, run: str, place: BlockPlace, records: Iterable[Record]) -> dict[str, Any]:
        """Return what the next execution of a run includes, see `systems.benchmark.RoundOptions`.

        The first successful execution of a run by this worker includes the check of its output. The
        later ones measure the same code on the same GPU. In a trial, each run has its own hold. The
        longest of them is the hold of all rounds, so that no process has another clock. Without a
        trial, it is the longest so far.
        """
        since = [
            record
            for record in self._own(records)
            if record.status is Status.ok
            and record.submission == self._submission
            and record.started_at >= self._since
        ]
        facts = [record.measurements.facts for record in since if record.measurements]
        sustained = run in self._block.sustained and not place.trial
        options: dict[str, Any] = {
            "check": all(record.run != run for record in since),
            "sustained_s": self._sustained_s if sustained else 0.0,
            "hold_ms": 0.0 if place.trial else self._hold_ms(since),
        }
        # Older checkouts do not know the option `shared`.
        shared = [one["shared"] for one in facts if one.get("shared")]
        return options | ({"shared": shared[0]} if shared else {})

    def _hold_ms(self, records: Iterable[Record]) -> float:
        measured = [r.measurements for r in records if is_trial(r) or not self._trial]
        holds = [each.facts.get("hold_ms") for each in measured if each is not None]
        return max((hold for hold in holds if isinstance(hold, float)), default=0.0)

    def _own(self, records: Iterable[Record]) -> list[Record]:
        return [r for r in records if r.block is not None and r.block.id == self._block.id]
