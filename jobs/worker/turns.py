"""The order in which a worker executes the runs of a block, and what each execution includes.

Before the first round that a worker executes, it executes each run once in a trial. The trial
checks the output, so that no round includes the check, and finds the longest hold. Its times are
thrown away: its first process starts from another state of the GPU, and its processes have holds of
their own. On GPUs where an earlier worker tried the same code with the same libraries, only the
baseline is tried, and runs that were not tried there.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

from jobs.block import Block, TaskKey
from jobs.results.counting import (
    complete_executions,
    complete_rounds,
    is_done_in_job,
    is_trial,
)
from jobs.results.manifest import Job, Manifest
from jobs.results.record import BlockPlace, Record, is_stale
from jobs.results.record_reader import RecordTail
from jobs.status import Status
from jobs.worker.recorder import Recorder

# A run that ended so in one round would end so in the next. Other failures may be accidents.
_LASTING = (Status.unsupported, Status.wrong, Status.oom, Status.timeout)


class KnownResults:
    """The records of the runs of a job in its results folder, oldest first."""

    def __init__(self, manifest: Manifest, job: Job, recorder: Recorder):
        self._manifest, self._recorder = manifest, recorder
        self._tail = RecordTail(manifest.folder, {run for run, _ in job.tasks})
        self.records: list[Record] = []

    def refresh(self) -> None:
        self.records += self._tail.new()

    def of(self, task: TaskKey) -> list[Record]:
        return [record for record in self.records if (record.run, record.repeat) == task]

    def is_result(self, record: Record) -> bool:
        """Return whether the worker keeps a record instead of executing its run again."""
        manifest, recorder = self._manifest, self._recorder
        return is_done_in_job(
            record,
            manifest.id,
            usable=not manifest.force
            and record.device == recorder.device
            and (manifest.keep_stale or not is_stale(record, recorder.code.hashes)),
        )

    def is_earlier_trial(self, record: Record) -> bool:
        """Return whether a record is of a trial of the code that this worker executes."""
        now = self._recorder.code.hashes.get(record.run)
        allowed = not self._manifest.force or record.submission == self._manifest.id
        return is_trial(record) and allowed and now is not None and record.source_hash == now


class Turns:
    """Plans the rounds of one block for a worker, and the trial before them if there is one."""

    def __init__(self, block: Block, manifest: Manifest, has_trial: bool, known: KnownResults):
        self._block, self._has_trial, self._known = block, has_trial, known
        self._submission = manifest.id
        keys = manifest.sweep.blocks
        sustained = keys.sustained if keys is not None else None
        self._sustained_s = sustained.seconds if sustained is not None else 0.0
        self._since = time.time()

    def complete(self) -> set[int]:
        return complete_rounds(self._block, self._own(), self._known.is_result)

    def was_executed(self, round: int) -> bool:
        """Return whether a round was executed as a whole, with any outcome."""
        own = [r for r in self._own() if r.block and r.block.round == round]
        return bool(complete_executions(own))

    def places(self, round: int, trial: bool = False) -> list[tuple[TaskKey, BlockPlace]]:
        """Return the tasks of a new execution of a round, or of the trial before it, in order."""
        block, execution = self._block, uuid.uuid4().hex[:12]
        tasks = block.first_tasks(round) if trial else block.tasks(round)
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

    def lasting_failure(self, run: str) -> Record | None:
        """Return the record of a failure in this submission that would repeat, if there is one."""
        mine = (r for r in self._own() if (r.run, r.submission) == (run, self._submission))
        return next((record for record in mine if record.status in _LASTING), None)

    def was_tried(self, run: str) -> bool:
        """Return whether a run was ok in a trial, of this worker or of an earlier one here."""
        return any(record.run == run and is_trial(record) for record in self._successes())

    def options(self, run: str, place: BlockPlace) -> dict[str, Any]:
        """Return what the next execution of a run includes, see `systems.benchmark.RoundOptions`.

        The first successful execution of a run includes the check of its output. In a trial, each
        run has its own hold. The longest of them, or without a trial the longest so far, is the
        hold of all rounds, so that no process has another clock.
        """
        found = self._successes()
        holds = [_fact(r, "hold_ms") for r in found if is_trial(r) or not self._has_trial]
        longest = max((hold for hold in holds if isinstance(hold, float)), default=0.0)
        sustained = run in self._block.sustained and not place.trial
        return {
            "check": all(record.run != run for record in found),
            "sustained_s": self._sustained_s if sustained else 0.0,
            "hold_ms": 0.0 if place.trial else longest,
        }

    def _successes(self) -> list[Record]:
        """Return the successful attempts of this worker, and earlier trials on the same GPUs.

        Of each run, only the latest trial counts. Before its first success, a worker does not know
        its GPUs, so it always tries the baseline.
        """
        ok = [record for record in self._own() if record.status is Status.ok]
        mine = [r for r in ok if r.submission == self._submission and r.started_at >= self._since]
        if not mine or not self._has_trial:
            return mine
        here, again = _machine(mine[0]), {record.run for record in mine if is_trial(record)}
        trials = (r for r in ok if self._known.is_earlier_trial(r) and r.allocation is not None)
        latest = {record.run: record for record in trials if _machine(record) == here}
        return [*mine, *(record for run, record in latest.items() if run not in again)]

    def _own(self) -> list[Record]:
        records = self._known.records
        return [r for r in records if r.block is not None and r.block.id == self._block.id]


def _machine(record: Record) -> tuple[Any, ...]:
    """Return the GPUs and the libraries with which a record was measured."""
    return record.allocation, *(record.environment.get(name) for name in ("driver", "packages"))


def _fact(record: Record, name: str) -> Any:
    return record.measurements.facts.get(name) if record.measurements is not None else None
