"""What a worker knows of the results folder: the records of its runs, and which are cancelled."""

from __future__ import annotations

from jobs.block import TaskKey
from jobs.results.cancelled import read_cancelled
from jobs.results.counting import is_done_in_job
from jobs.results.manifest import Job, Manifest
from jobs.results.record import Record
from jobs.results.record_reader import RecordTail
from jobs.worker.recorder import Recorder


class KnownResults:
    """The records in the folder of the runs of a job, oldest first, also of other submissions."""

    def __init__(self, manifest: Manifest, job: Job, recorder: Recorder):
        self._manifest, self._recorder = manifest, recorder
        self._tail = RecordTail(manifest.folder, {run for run, _ in job.tasks})
        self.records: list[Record] = []
        self.cancelled: set[TaskKey] = set()  # what `jobs cancel --where` listed

    def refresh(self) -> None:
        self.records += self._tail.new()
        # A union, because a network file system may fail for a moment.
        self.cancelled |= read_cancelled(self._manifest.path)

    def of(self, task: TaskKey) -> list[Record]:
        return [record for record in self.records if (record.run, record.repeat) == task]

    def is_result(self, record: Record) -> bool:
        """Return whether the worker keeps a record instead of executing its run again.

        It does if this submission has recorded the run, unless it was preempted or cancelled.
        Without `--force`, it also keeps records with status ok from the same kind of device and,
        without `--keep-stale`, from the same sources.
        """
        manifest, recorder = self._manifest, self._recorder
        return is_done_in_job(
            record,
            manifest.id,
            cancelled=(record.run, record.repeat) in self.cancelled,
            usable=not manifest.force
            and record.device == recorder.device
            and (manifest.keep_stale or not recorder.code.staleness.is_stale(record)),
        )
