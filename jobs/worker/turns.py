"""The order in which a worker executes the runs of a block, and what each execution includes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterable
from typing import Any

from jobs.block import Block, TaskKey
from jobs.results.counting import complete_rounds
from jobs.results.manifest import Manifest
from jobs.results.record import BlockPlace, Record
from jobs.status import Status

# A run that ended so in one round would end so in the next. Other failures may be accidents.
_LASTING = (Status.unsupported, Status.wrong, Status.oom, Status.timeout)
IsResult = Callable[[Record], bool]


class Turns:
    """Plans the rounds of one block for a worker."""

    def __init__(self, block: Block, manifest: Manifest):
        self._block = block
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

    def places(self, round: int) -> list[tuple[TaskKey, BlockPlace]]:
        """Return the (run id, repeat) pairs of a new execution of a round, in order."""
        block, execution = self._block, uuid.uuid4().hex[:12]
        tasks = block.tasks(round)
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

    def options(self, run: str, records: Iterable[Record]) -> dict[str, Any]:
        """Return what the next execution of a run includes, see `systems.benchmark.RoundOptions`.

        The first successful execution of a run by this worker includes the check of its output and
        the measurement over seconds. The later ones measure the same code on the same GPU.
        """
        since = [
            record
            for record in self._own(records)
            if record.status is Status.ok
            and record.submission == self._submission
            and record.started_at >= self._since
        ]
        first = all(record.run != run for record in since)
        sustained = first and run in self._block.sustained
        facts = [record.measurements.facts for record in since if record.measurements]
        holds = [one.get("hold_ms") for one in facts]
        options: dict[str, Any] = {
            "check": first,
            "sustained_s": self._sustained_s if sustained else 0.0,
            "hold_ms": max((hold for hold in holds if isinstance(hold, float)), default=0.0),
        }
        # Older checkouts do not know the option `shared`.
        shared = [one["shared"] for one in facts if one.get("shared")]
        return options | ({"shared": shared[0]} if shared else {})

    def _own(self, records: Iterable[Record]) -> list[Record]:
        return [r for r in records if r.block is not None and r.block.id == self._block.id]
