"""The status of a run, and the state of a job."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """The status of a run, taken from its record, or from its job if it has no record."""

    ok = "ok"
    oom = "oom"  # out of GPU or host memory
    timeout = "timeout"
    error = "error"  # the benchmark raised an exception
    wrong = "wrong"  # the output differs from the reference
    unsupported = "unsupported"  # this machine or library cannot do the run
    killed = "killed"
    preempted = "preempted"
    cancelled = "cancelled"
    # Statuses that never appear in a record:
    queued = "queued"
    running = "running"
    missing = "missing"  # no record, and no job that could still write one

    @property
    def is_live(self) -> bool:
        """Whether the run is queued or running."""
        return self in _LIVE

    @property
    def can_be_recorded(self) -> bool:
        """Whether an attempt can end with this status, so that a record may have it."""
        return self not in _LIVE and self is not Status.missing

    @property
    def is_failure(self) -> bool:
        """Whether this status makes a command exit with 1. `oom` and `unsupported` are results."""
        return self not in _RESULTS and not self.is_live

    @property
    def runs_again_on_submit(self) -> bool:
        """Whether the next submission runs the run again."""
        return self in _INTERRUPTED

    @property
    def runs_again_on_retry(self) -> bool:
        """Whether the next submission with `--retry-failed` runs the run again."""
        return self in _RETRIED


_LIVE = {Status.queued, Status.running}
_RESULTS = {Status.ok, Status.oom, Status.unsupported}
_INTERRUPTED = {Status.killed, Status.preempted, Status.cancelled, Status.missing}
_RETRIED = {Status.oom, Status.timeout, Status.error, Status.wrong}


@dataclass(frozen=True, slots=True)
class JobState:
    """The state of a job as reported by Slurm, or by the process that runs it."""

    status: Status
    detail: str  # the report itself, for example "Slurm job 12_3 is PENDING (Priority)"


JobStates = dict[str, dict[int, JobState]]  # submission id -> job index -> state
