"""The Record: what one attempt of one run left behind, one JSON object a line.

`record_writer` writes them, `record_reader` reads them.
"""

from __future__ import annotations

from array import array
from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationInfo,
    model_validator,
)

from jobs.status import Status

SCHEMA_VERSION = 1
RECORDS = "records"  # folder of records inside a results folder


# JSON has no NaN: what is not finite would come back as null, and the record with it be lost.
Number = Annotated[float, Field(allow_inf_nan=False)]
# A hundred thousand records must fit in a gigabyte: samples as machine numbers, not objects, and
# one copy of what a whole job shares.
Samples = Annotated[
    list[Annotated[Number, Field(ge=0)]],
    Field(min_length=1),
    AfterValidator(partial(array, "d")),
    PlainSerializer(list),
]
# What a run says of itself may hold bytes that are no UTF-8, as in a file's name.
Text = Annotated[str, BeforeValidator(lambda v: _encodable(v) if isinstance(v, str) else v)]


def _encodable(value: Any) -> Any:
    """The same value with every lone surrogate in its texts replaced."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {_encodable(k): _encodable(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_encodable(item) for item in value]
    return value


def _shared(value: Any, info: ValidationInfo) -> Any:
    """The same value, one copy for all records that are read with the same context."""
    return value if info.context is None else info.context.setdefault(repr(value), value)


def _recorded(status: Status) -> Status:
    if not status.can_be_recorded:
        valid = ", ".join(status for status in Status if status.can_be_recorded)
        raise ValueError(f"no attempt ends as {status} (valid: {valid})")
    return status


RecordedStatus = Annotated[Status, AfterValidator(_recorded)]


class _Part(BaseModel):
    # Later versions may add keys: an older reader takes what it knows.
    model_config = ConfigDict(frozen=True, extra="ignore")


class Failure(_Part):
    """Why a run has no measurements."""

    type: str  # of the exception, or what happened: Timeout, SIGKILL, exit code 3
    message: Text
    traceback: Text | None = None
    rank: int | None = None  # of several ranks, the one that failed first
    memory: Literal["gpu", "host"] | None = None  # which ran out
    requested_bytes: int | None = None  # by the allocation that failed
    allocated_bytes: int | None = None  # at that moment, by this process


class Measurements(_Part):
    """The facts that a benchmark's `run` returned.

    By phase. With several ranks, samples_ms and peak_memory_bytes hold one entry a rank.
    """

    samples_ms: dict[str, Samples | Annotated[list[Samples], Field(min_length=1)]] = {}
    peak_memory_bytes: dict[str, int | Annotated[list[int], Field(min_length=1)]] = {}
    flops: dict[str, Number] = {}
    bytes: dict[str, Number] = {}
    bus_bytes: dict[str, Number] = {}
    tokens: dict[str, Number] = {}  # that all ranks together go through in one sample
    facts: Annotated[dict[str, Any], BeforeValidator(_encodable)] = {}
    compiling_seconds: Number | None = None  # where the benchmark counts it


class Seconds(_Part):
    """Where the time of an attempt went."""

    waiting: float | None = None  # from submission to the worker's start
    starting: float | None = None  # from the worker's decision to the call of run()
    compiling: float | None = None  # inside run(), as the benchmark counts it
    measuring: float | None = None  # the rest of run()


class Record(_Part):
    """One attempt of one run. `measurements` exist only where the status is ok."""

    schema_version: int = SCHEMA_VERSION
    run: str
    repeat: int
    attempt: int
    status: RecordedStatus
    sweep: str
    submission: str
    job: int
    benchmark: str
    version: int
    params: dict[str, Any]
    device: str  # the kind measured: a GPU's name, or cpu: and the processor's
    started_at: float
    finished_at: float
    seconds: Seconds = Seconds()
    measurements: Measurements | None = None
    failure: Failure | None = None
    environment: Annotated[dict[str, Any], AfterValidator(_shared)] = {}
    gpus: list[dict[str, Any]] = []  # name, uuid, and NVML's state before and after
    slurm: Annotated[dict[str, str], AfterValidator(_shared)] = {}
    log: str | None = None  # path of the run's output, relative to the results folder
    artifacts: str | None = None  # folder of the files that it left, relative to that too

    @model_validator(mode="after")
    def _facts_fit_the_status(self) -> Self:
        if (self.status == Status.ok) != (self.measurements is not None):
            raise ValueError(
                f"measurements must exist if and only if status is ok, not {self.status}"
            )
        if self.status == "ok" and self.failure is not None:
            raise ValueError("an ok record has no failure")
        return self
