"""The status of a run, and the state of a job."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """The status of a run: from its record, or else from the state of its job."""

    ok = "ok"
    oom = "oom"  # out of GPU or host memory
    timeout = "timeout"
    error = "error"  # the benchmark raised an exception
    wrong = "wrong"  # the output differs from the reference
    unsupported = "unsupported"  # this machine or a library does not support the run
    killed = "killed"  # the process, its worker or its node ended unexpectedly
    preempted = "preempted"
    cancelled = "cancelled"
    # Statuses that never appear in a record:
    queued = "queued"
    running = "running"
    unknown = "unknown"  # a job may be queued or running, but Slurm does not answer for it
    missing = "missing"  # no record, and no job that could still write one
    not_needed = "not_needed"  # a round of a block that was decided before

    @property
    def is_live(self) -> bool:
        """Whether the run is, or may be, queued or running."""
        return self in (Status.queued, Status.running, Status.unknown)

    @property
    def can_be_recorded(self) -> bool:
        """Whether a record can have this status."""
        return not self.is_live and self not in (Status.missing, Status.not_needed)

    @property
    def is_failure(self) -> bool:
        """Whether this status is a failure, for which `jobs status` exits with code 1."""
        results = (Status.ok, Status.oom, Status.unsupported, Status.not_needed)
        return self not in results and not self.is_live

    @property
    def runs_again_on_submit(self) -> bool:
        """Whether a new submission of the sweep executes the run again."""
        return self.runs_again_in_its_job or self in (Status.killed, Status.missing)

    @property
    def runs_again_in_its_job(self) -> bool:
        """Whether a requeued job, or a new worker of the job, executes the run again."""
        return self in (Status.preempted, Status.cancelled)

    @property
    def runs_again_on_retry(self) -> bool:
        """Whether a new submission executes the run again only with `--retry-failed`."""
        return self in (Status.oom, Status.timeout, Status.error, Status.wrong)


@dataclass(frozen=True, slots=True)
class JobState:
    """The state of a job as reported by Slurm, or by the process that runs it."""

    status: Status
    detail: str  # text for the user, for example "Slurm job 12_3 is PENDING (Priority)"


JobStates = dict[str, dict[int, JobState]]  # submission id -> job index -> state
