"""A job that was given to sbatch, and how it is recognized in Slurm's queue.

Its number is not enough: every cluster has these numbers, and a controller that lost its state
begins anew. So each job has a word in its comment, its token, which no other job has. It is saved
before sbatch is called, so it also finds a job whose number is unknown because sbatch was
interrupted.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from pydantic import Field

_Id = Annotated[str, Field(pattern=r"^\d+(_\d+)?$", coerce_numbers_to_str=True)]
_TOKEN = re.compile(r"\bsweep:\d{8}-\d{6}-\d+-\w{4}\.\d+\b")
# A job of the same name and user is another one if it was submitted this long before, in seconds.
# The clocks of hosts differ, and times without a zone are ambiguous by an hour.
EARLIER_S = 7200.0


@dataclass(frozen=True)
class QueuedJob:
    """A job as squeue lists it. It lists jobs that have ended for some minutes."""

    number: int  # for an element of a job array, the number of the array
    element: int | None  # index in its job array
    user: int
    name: str
    submitted: float  # in seconds since the epoch; after a requeue, the time of that
    state: str  # Slurm's word, for example RUNNING
    reason: str  # why the job is pending, or ""
    comment: str

    @property
    def id(self) -> str:
        return f"{self.number}" if self.element is None else f"{self.number}_{self.element}"

    @property
    def token(self) -> str:
        found = _TOKEN.search(self.comment)
        return found[0] if found else ""

    @property
    def words(self) -> str:
        """The state with its reason, for example "PENDING (Priority)"."""
        # For a cancelled job, squeue shows the reason why the job was pending before.
        shown = self.reason not in ("", "None") and self.state != "CANCELLED"
        return f"{self.state} ({self.reason})" if shown else self.state


@dataclass(frozen=True)
class SlurmJob:
    """A job of a submission in Slurm. Fields that an earlier version did not save are empty."""

    # As in `QueuedJob`. None: sbatch has not answered.
    id: Annotated[_Id | None, Field(validation_alias="slurm")]
    token: str = ""
    element: int | None = None  # index in its job array; None: the job is no array
    cluster: str = ""
    user: int | None = None
    name: str = ""
    since: float = 0.0  # time of the call of sbatch, in seconds since the epoch

    def with_number(self, number: str) -> SlurmJob:
        return replace(self, id=number if self.element is None else f"{number}_{self.element}")

    def entry(self) -> dict[str, Any]:
        """Return this job for the file handles.json, in which the id has the key "slurm"."""
        entry = asdict(self)
        return {"slurm": entry.pop("id"), **entry}

    def is_same(self, other: QueuedJob) -> bool:
        """Return whether a queued job with this number is this job.

        A site may replace comments. Without any token, user, name and time decide.
        """
        if other.token:
            return other.token == self.token
        return (
            self.user in (None, other.user)
            and self.name == other.name
            and other.submitted > self.since - EARLIER_S
        )


def token_of(submission: str, array: int) -> str:
    return f"sweep:{submission}.{array}"
