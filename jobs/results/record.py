"""The record of one attempt, i.e. one execution of a run, stored as one line of JSON."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Collection, Iterable, Mapping
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
SUMMARY_LENGTH = 200  # maximum number of characters of a message in a summary


# JSON has no NaN or infinity. Such a value would be written as null, and the record could not be
# read back.
Number = Annotated[float, Field(allow_inf_nan=False)]
# 100,000 records must fit in 1 GB of memory. Samples are therefore an array of C doubles instead
# of Python objects, and `_shared` keeps only one copy of values that many records have.
Samples = Annotated[
    list[Annotated[Number, Field(ge=0)]],
    Field(min_length=1),
    AfterValidator(partial(array, "d")),
    PlainSerializer(list),
]


def _encodable(value: Any) -> Any:
    """Escape lone surrogates, e.g. from invalid bytes in a path. UTF-8 cannot encode them."""
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


Text = Annotated[str, BeforeValidator(_encodable)]


def _shared(value: Any, info: ValidationInfo) -> Any:
    """Return the first equal value in the context of the validation, which records then share."""
    return value if info.context is None else info.context.setdefault(repr(value), value)


def _readable(environment: dict[str, Any]) -> dict[str, Any]:
    git, code = environment.get("git"), environment.get("code")
    is_list = isinstance(code, list) and all(isinstance(entry, dict) for entry in code)
    if not (git is None or isinstance(git, dict)) or not (code is None or is_list):
        got = f"got {git!r:.50} and {code!r:.50}"
        raise ValueError(f"git must be an object and code a list of objects, {got}")
    return environment


def _known(version: int) -> int:
    if version > SCHEMA_VERSION:
        raise ValueError(
            f"must be at most {SCHEMA_VERSION} in this version of the project, got {version}; "
            "update the project"
        )
    return version


def _recorded(status: Status) -> Status:
    if not status.can_be_recorded:
        valid = ", ".join(status for status in Status if status.can_be_recorded)
        raise ValueError(f"status of a record must be one of {valid}, got {status}")
    return status


RecordedStatus = Annotated[Status, AfterValidator(_recorded)]


class _Part(BaseModel):
    # Later versions may add keys, which older versions ignore.
    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)


class Failure(_Part):
    """Why an attempt failed."""

    type: str  # type of the exception, or a cause such as Timeout, SIGKILL or exit code 3
    message: Text
    traceback: Text | None = None
    rank: int | None = None  # the rank whose failure is described here
    phase: str | None = None  # phase of the benchmark that failed, if it is known
    memory: Literal["gpu", "host"] | None = None  # the kind of memory that ran out
    requested_bytes: int | None = None  # size of the failed GPU allocation
    allocated_bytes: int | None = None  # GPU memory that the process held at the failure

    @property
    def summary(self) -> str:
        """The type and the first non-empty line of the message, e.g. `ValueError: no such file`."""
        lines = (line.strip() for line in self.message.splitlines())
        first = next(filter(None, lines), "")
        if len(first) > SUMMARY_LENGTH:
            first = first[: SUMMARY_LENGTH - 1] + "…"
        return f"{self.type}: {first}" if first else self.type


class Measurements(_Part):
    """The results that the function `run` of a benchmark returned.

    The keys of all dicts except `facts` are phases: parts of the benchmark that are measured
    separately, such as "forward". In a run with several ranks, each phase of `samples_ms` and
    `peak_memory_bytes` has a list with one element per rank. `facts` has other results by name.
    """

    samples_ms: dict[str, Samples | Annotated[list[Samples], Field(min_length=1)]] = {}
    peak_memory_bytes: dict[str, int | Annotated[list[int], Field(min_length=1)]] = {}
    flops: dict[str, Number] = {}  # number of floating-point operations in one sample
    bytes: dict[str, Number] = {}  # number of bytes that one sample moves, for `bandwidth`
    bus_bytes: dict[str, Number] = {}  # number of bytes, for `bus_bandwidth` as in nccl-tests
    tokens: dict[str, Number] = {}  # number of tokens that all ranks together process in one sample
    facts: dict[str, Any] = {}
    compiling_seconds: Number | None = None  # compile time, if the benchmark reports it


class Seconds(_Part):
    """Time that each stage of an attempt took, in seconds."""

    waiting: float | None = None  # from the submission to the start of the worker
    starting: float | None = None  # from the start of the attempt to the call of run()
    compiling: float | None = None  # compile time inside run(), if the benchmark reports it
    measuring: float | None = None  # the rest of the time inside run()


class BlockPlace(_Part):
    """Where an attempt was executed in a block. Only equal `execution`s are compared."""

    id: str  # id of the block
    round: int  # number of the round; the first is 0
    execution: str  # identifies one execution of the round
    position: int  # position of the attempt in the execution; the first is 0
    size: int  # number of attempts in a complete execution
    baseline: bool  # whether the run is the baseline of the block
    second: bool = False  # whether it is the second attempt of the baseline in the round
    trial: bool = False  # whether it is in a trial; `round` is then the round after the trial


class Record(_Part):
    """The outcome of one attempt. It has `measurements` if and only if its status is ok."""

    # The first field, so that it is the first problem of a record that a later version wrote.
    schema_version: Annotated[int, AfterValidator(_known)] = SCHEMA_VERSION
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
    device: str  # name of the GPU, or "cpu: " followed by the name of the CPU
    started_at: float  # in seconds since the epoch
    finished_at: float  # in seconds since the epoch
    seconds: Seconds = Seconds()
    measurements: Measurements | None = None
    failure: Failure | None = None
    environment: Annotated[dict[str, Any], AfterValidator(_readable), AfterValidator(_shared)] = {}
    gpus: list[dict[str, Any]] = []  # name and uuid of each GPU; earlier records have more
    slurm: Annotated[dict[str, str], AfterValidator(_shared)] = {}
    block: BlockPlace | None = None  # None: the run was not measured in a block
    checkout: str = ""  # name of another checkout of the code, see `jobs.run.Run`
    # By phase: clocks, power, temperature and throttling of the GPUs while the phase was measured,
    # see `jobs.worker.conditions`.
    conditions: dict[str, dict[str, Any]] = {}
    source_hash: str | None = None  # hash of the sources that were measured; None: unknown
    log: str | None = None  # path of the log, relative to the results folder
    artifacts: str | None = None  # folder of the run's files, relative to the results folder

    @property
    def allocation(self) -> str | None:
        """A hash of the GPUs, or CPU threads, and the boot of the host. None: it is unknown."""
        boot = self.environment.get("boot_id")
        if not isinstance(boot, str):
            return None
        used = sorted(str(gpu.get("uuid")) for gpu in self.gpus)
        if not used and self.environment.get("threads"):
            used = [f"{self.environment['threads']} threads"]
        text = " ".join([boot, *used, self.slurm.get("job_nodelist", "")])
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    @model_validator(mode="after")
    def _facts_fit_the_status(self) -> Self:
        if (self.status == Status.ok) != (self.measurements is not None):
            raise ValueError(
                "measurements are required if status is ok and not allowed otherwise, "
                f"got status {self.status}"
            )
        if self.status == "ok" and self.failure is not None:
            raise ValueError("a record with status ok must not have the field failure")
        return self


def throttle_reasons(record: Record, phases: Collection[str] = ()) -> set[str]:
    """Return what slowed down a GPU in some phases of a record. Empty: in any phase."""
    return {
        reason
        for phase, conditions in record.conditions.items()
        if phase in phases or not phases
        for reason in conditions.get("throttle", ())
    }


def is_stale(record: Record, source_hashes: Mapping[str, str | None]) -> bool:
    """Return whether a record is from older code, from the present hashes by run id."""
    now = source_hashes.get(record.run)
    return now is not None and record.source_hash != now


def present_last(
    records: Iterable[Record], source_hashes: Mapping[str, str | None]
) -> list[Record]:
    """Return records, oldest first, but unknown code before all, and the present code last."""

    def rank(record: Record) -> tuple[bool, bool]:
        # Records of another checkout never have a hash.
        is_known = record.source_hash is not None or bool(record.checkout)
        return is_known, not is_stale(record, source_hashes)

    return sorted(records, key=rank)


def is_without_code(record: Record, source_hashes: Mapping[str, str | None]) -> bool:
    """Return whether the code of a record was found and is not now, so it may be older code.

    That is not so for a record of another checkout, whose code is never compared.
    """
    now = source_hashes.get(record.run, "")  # "": not determined
    return now is None and record.source_hash is not None and not record.checkout
