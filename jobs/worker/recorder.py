"""Makes and writes records: the outcome of an attempt, and information about code and machine."""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs import provenance
from jobs.code.short_names import run_labels
from jobs.errors import nearest
from jobs.printing import say
from jobs.processes import boot_id
from jobs.results import unwritable
from jobs.results.manifest import Job, Manifest
from jobs.results.record import RECORDS, BlockPlace, Failure, Measurements, Record, Seconds
from jobs.results.record_writer import RecordWriter
from jobs.results.worker_state import RunningAttempt, claim_job, is_claimed_by
from jobs.run import Run
from jobs.status import Status
from jobs.worker.code_reader import CodeReader
from jobs.worker.conditions import energy_facts
from jobs.worker.environment import THREADS, thread_limit
from jobs.worker.isolation import blocked_signals
from jobs.worker.messages import Outcome

Conditions = dict[str, dict[str, Any]]  # of `ConditionSampler.by_phase`
_SLURM = (
    "job_id", "array_job_id", "array_task_id", "cluster_name", "job_partition", "job_nodelist",
    "restart_count",
)  # fmt: skip


class CannotRecord(SystemExit):
    """Raised to end a worker that cannot write a record. It could not record later runs either."""

    def __init__(self, error: OSError):
        super().__init__(unwritable.EXIT_CODE)
        self.error = error


@dataclass(frozen=True)
class Attempt:
    """One attempt to execute a run, created when the attempt begins."""

    run: Run
    repeat: int
    number: int  # number of the attempt; the first is 1
    log: Path  # file for the output of the run
    artifacts: Path  # folder for files of the run, created by the benchmark if needed
    code: dict[str, Any]  # states of the code when the attempt began, as in the record
    started_at: float  # start of the attempt, in seconds since the epoch
    clock: float  # start on the monotonic clock, in seconds; used for durations
    source_hash: str | None = None  # hash of the sources when the attempt began; None: unknown
    place: BlockPlace | None = None  # where the attempt is executed in its block, if it has one

    def as_state(self) -> RunningAttempt:
        return RunningAttempt(run=self.run.id, repeat=self.repeat, attempt=self.number)


def slurm_facts() -> dict[str, str]:
    """Return what Slurm's environment variables say about this job, for example "job_id"."""
    names = {name: f"SLURM_{name.upper()}" for name in _SLURM}
    return {name: os.environ[known] for name, known in names.items() if known in os.environ}


def job_id(facts: dict[str, str]) -> str:
    """Return the id of a Slurm job from its `slurm_facts`: "123", or "123_4" in an array."""
    array = facts.get("array_job_id")
    return f"{array}_{facts.get('array_task_id')}" if array else facts.get("job_id", "")


class Recorder:
    """Writes the records of one job to a file that no other job uses."""

    def __init__(self, manifest: Manifest, job: Job, gpus: list[str], slurm: dict[str, str]):
        self._manifest, self._job, self._slurm = manifest, job, slurm
        self._waiting = time.time() - manifest.created_at
        self._label = run_labels(list(manifest.runs.values()), manifest.sweep.parameters())
        self._folder = manifest.job_folder(job.index)
        self._token: str | None = None
        self._writer = RecordWriter(manifest.folder / RECORDS, f"{manifest.id}-{job.index}")
        # Code that reads sources of benchmarks would take the SystemExit of a handler for theirs.
        with blocked_signals():
            self.code = CodeReader(manifest, [manifest.runs[run] for run, _ in job.tasks])
        self.device = provenance.device_kind(gpus)
        self._gpus = provenance.gpu_names(gpus)
        self._environment = {
            "host": socket.gethostname(),
            "boot_id": boot_id(),
            "processor": provenance.processor(),
            "driver": provenance.driver_version(),
            "packages": provenance.packages(),
            "executor": manifest.executor,
            "threads": thread_limit(job.shape).get(THREADS),
        }

    def begin(self, run: Run, repeat: int, number: int, place: BlockPlace | None = None) -> Attempt:
        """Return a new attempt with the current time, and the states of the code."""
        log = self._folder / f"{run.id}-{repeat}-{number}.log"
        artifacts = self._manifest.artifacts(run.id, repeat, number)
        code = self.code.environment(run)
        with blocked_signals():  # as in __init__
            digest = self.code.source_hash(run)
        now, clock = time.time(), time.monotonic()
        return Attempt(run, repeat, number, log, artifacts, code, now, clock, digest, place)

    def write(
        self, attempt: Attempt, outcome: Outcome, conditions: Conditions | None = None
    ) -> Record:
        """Write and print the record of one attempt. Raises CannotRecord, or as `require_job`."""
        self.require_job()
        record = self._record(attempt, outcome, conditions or {})
        if not self._writer.write(record):
            assert self._writer.error is not None
            unwritable.mark(self._manifest.path, self._job.index, self._writer.error)
            raise CannotRecord(self._writer.error)
        took = time.monotonic() - attempt.clock
        why = f": {record.failure.summary}" if record.failure is not None else ""
        label = f"{record.run}  {self._label(attempt.run)}"
        say(f"{record.status:11} {took:7.1f} s  {label}{why}", sys.stdout)
        return record

    def claim_job(self) -> None:
        """Let this worker replace an earlier worker of the job that may still be running."""
        self._token = claim_job(self._folder)

    def require_job(self) -> None:
        """Raise CannotRecord if the results folder is gone, or exit if this worker is replaced."""
        if not self._folder.is_dir():
            error = FileNotFoundError(errno.ENOENT, "moved or removed while its runs executed")
            say(f"{self._manifest.folder} was {error.strerror}; this worker ends", sys.stderr)
            raise CannotRecord(error)
        if self._token is not None and not is_claimed_by(self._folder, self._token):
            say("another worker of this job has started; this one records nothing", sys.stderr)
            raise SystemExit(1)

    def claimed(self, attempt: Attempt) -> Attempt:
        """Create the log of an attempt, and return the attempt.

        If a worker that died or was replaced has begun an attempt with the same number and thus has
        created its log, the attempt gets the next free number.
        """
        while True:
            try:
                os.close(os.open(attempt.log, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
                return attempt
            except FileExistsError:
                number = attempt.number + 1
                attempt = self.begin(attempt.run, attempt.repeat, number, attempt.place)
            except OSError:  # e.g. a full disk, which the record shows
                return attempt

    def _record(self, attempt: Attempt, outcome: Outcome, conditions: Conditions) -> Record:
        manifest, run = self._manifest, attempt.run
        measurements = None
        status, failure, measuring = outcome.status, outcome.failure, outcome.measuring
        if status is Status.ok:
            try:
                measurements = _measurements_of(outcome)
                facts = measurements.facts | energy_facts(measurements, conditions)
                measurements = measurements.model_copy(update={"facts": facts})
            except ValueError as error:
                message = f"a record cannot store what {run.benchmark}.run() returned: {error}"
                status = Status.error
                failure = Failure(type="ValidationError", message=message)
        compiling = measurements.compiling_seconds if measurements else None
        folder = manifest.folder
        sources = self.code.source_hash(run)
        if sources != attempt.source_hash:  # a benchmark imports modules while it runs
            sources = None
        code = attempt.code
        if sources is None and self.code.hashes[run.id] is not None:
            code = self.code.of_changed_code(code)
        return Record(
            run=run.id,
            repeat=attempt.repeat,
            attempt=attempt.number,
            status=status,
            sweep=manifest.sweep.name,
            submission=manifest.id,
            job=self._job.index,
            benchmark=run.benchmark,
            version=run.version,
            params=run.params,
            device=self.device,
            started_at=attempt.started_at,
            finished_at=time.time(),
            seconds=Seconds(
                waiting=self._waiting,
                starting=outcome.starting,
                compiling=compiling,
                measuring=None if measuring is None else measuring - (compiling or 0.0),
            ),
            measurements=measurements,
            failure=failure,
            environment=self._environment | code | {"loaded": outcome.versions},
            gpus=self._gpus,
            slurm=self._slurm,
            conditions=conditions,
            block=attempt.place,
            checkout=run.checkout,
            source_hash=sources,
            log=str(attempt.log.relative_to(folder)) if attempt.log.exists() else None,
            artifacts=(
                str(attempt.artifacts.relative_to(folder)) if _holds(attempt.artifacts) else None
            ),
        )


def _measurements_of(outcome: Outcome) -> Measurements:
    """Return the results that a benchmark returned. Raises ValueError if they cannot be stored."""
    returned, valid = outcome.measurements or {}, list(Measurements.model_fields)
    for key in returned:
        if key not in valid:
            raise ValueError(f"unknown key {key!r}{nearest(key, valid)}; other results go in facts")
    return Measurements.model_validate(returned)


def _holds(folder: Path) -> bool:
    """Return whether a folder exists and contains files, perhaps from another node."""
    try:
        os.listdir(folder.parent)  # refreshes the cache of a network file system
        return bool(os.listdir(folder))
    except OSError:
        return False
