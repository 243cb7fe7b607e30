"""The status of a run and what follows from it; the state of a job."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How a run stands: what its latest record says, or, without a record, its job."""

    ok = "ok"
    oom = "oom"  # GPU or host memory ran out
    timeout = "timeout"
    error = "error"  # the benchmark raised
    wrong = "wrong"  # the output differs from the reference
    unsupported = "unsupported"  # this machine cannot do it
    killed = "killed"
    preempted = "preempted"
    cancelled = "cancelled"
    # Never in a record:
    queued = "queued"
    running = "running"
    missing = "missing"  # neither a record nor a job that lives

    @property
    def is_live(self) -> bool:
        """The run waits or executes."""
        return self in _LIVE

    @property
    def can_be_recorded(self) -> bool:
        """An attempt can end so."""
        return self not in _LIVE and self is not Status.missing

    @property
    def is_failure(self) -> bool:
        """Makes a command exit with 1. Out of memory and unsupported are results."""
        return self not in _RESULTS and not self.is_live

    @property
    def runs_again_on_submit(self) -> bool:
        """The next submission runs it again."""
        return self in _INTERRUPTED

    @property
    def runs_again_on_retry(self) -> bool:
        """The next submission runs it again where `--retry-failed` asks for it."""
        return self in _RETRIED


_LIVE = {Status.queued, Status.running}
_RESULTS = {Status.ok, Status.oom, Status.unsupported}
_INTERRUPTED = {Status.killed, Status.preempted, Status.cancelled, Status.missing}
_RETRIED = {Status.oom, Status.timeout, Status.error, Status.wrong}


@dataclass(frozen=True, slots=True)
class JobState:
    """A job as its executor has it: queued, running, or how it ended; and what says so."""

    status: Status
    detail: str


JobStates = dict[str, dict[int, JobState]]  # by submission and job
