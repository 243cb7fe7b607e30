"""How a run ended: from exceptions, exit codes, and what its processes wrote.

Pure: no process, no clock, no output.
"""

from __future__ import annotations

import json
import signal
import traceback
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict

from jobs.json_files import write_json
from jobs.results.record import Failure
from jobs.status import Status
from systems.benchmark import Unsupported, WrongOutput

TEXT = 16000  # characters of a traceback that a record keeps
_LOST_PEER = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")
LOST = {
    "ServerDied": "the process that it was forked from is gone",
    "NodeLost": "the worker of another node of the job is gone",
}


def _without_models(value: Any) -> Any:
    """A field for json.dump. pydantic's own JSON knows no lone surrogate and less nesting, and
    facts may have either."""
    if isinstance(value, list):
        return [_without_models(item) for item in value]
    return value.model_dump() if isinstance(value, BaseModel) else value


class _Message(BaseModel):
    """What processes of a run leave for the worker, as JSON in a file or through a socket."""

    model_config = ConfigDict(frozen=True)

    def write(self, path: Path) -> None:
        write_json(path, {name: _without_models(value) for name, value in self})

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls.model_validate(json.loads(path.read_bytes()))


class Outcome(_Message):
    """How one run, or one rank of it, ended: with measurements where it is ok, else a failure."""

    status: Status
    measurements: dict[str, Any] | None = None  # the facts that the benchmark returned
    failure: Failure | None = None
    # Where the benchmark's process could say it:
    starting: float | None = None  # seconds from the worker's decision to the call of run()
    measuring: float | None = None  # seconds inside run()
    ended_at: float = 0.0  # since the epoch
    versions: dict[str, Any] = {}  # of the libraries that were loaded
    rank: int = 0
    lost_peer: bool = False  # it failed because another rank is gone

    @property
    def is_ok(self) -> bool:
        return self.status is Status.ok


class RankFailure(_Message):
    """A rank that torchrun's agent saw end."""

    rank: int
    exit_code: int
    at: float  # since the epoch


class AgentReport(_Message):
    """How torchrun's agent on one node ended."""

    failures: list[RankFailure] = []
    error: str | None = None  # of the agent itself

    @property
    def is_ok(self) -> bool:
        return not self.failures and self.error is None


class NodeReport(_Message):
    """What one node's agent and ranks left."""

    token: str  # of the attempt
    exit_code: int | None = 0  # of the agent, where it ended by itself
    agent: AgentReport | None = None  # None: it ended without a report
    outcomes: list[Outcome] = []
    stacks: str = ""
    log_end: str = ""
    out_of_memory: bool = False  # the kernel killed a process of the job for want of memory
    lost: Literal["ServerDied", "NodeLost"] | None = None

    @property
    def is_ok(self) -> bool:
        return self.agent is not None and self.agent.is_ok


def failed(
    status: Status, kind: str, message: str, trace: str | None = None, **more: Any
) -> Outcome:
    """An outcome without measurements; `more` are fields of `Failure`."""
    failure = Failure(type=kind, message=message, traceback=trace or None, **more)
    return Outcome(status=status, failure=failure)


def outcome_of(error: BaseException, oom: dict[str, int] | None = None) -> Outcome:
    """The outcome that an exception stands for."""
    if isinstance(error, MemoryError):  # what its frames hold is needed to tell of it
        traceback.clear_frames(error.__traceback__)
    text = "".join(traceback.format_exception(error))
    failure = Failure(
        type=type(error).__name__,
        message=_message(error)[:4000],
        traceback=_plain_text(text)[-TEXT:],
    )
    memory = _memory_that_ran_out(error)
    if memory is not None:
        failure = failure.model_copy(update={"memory": memory, **(oom or {})})
        status = Status.oom
    elif isinstance(error, Unsupported):
        status = Status.unsupported
    else:
        status = Status.wrong if isinstance(error, WrongOutput) else Status.error
    return Outcome(status=status, failure=failure, lost_peer=_has_lost_peer(error))


def _message(error: BaseException) -> str:
    try:
        return _plain_text(str(error))
    except Exception as second:  # a __str__ that is broken itself
        return f"(its text cannot be had: {type(second).__name__})"


def _plain_text(text: str) -> str:
    """Text without half characters (undecodable bytes in a path, say), which JSON cannot hold."""
    return text.encode(errors="backslashreplace").decode()


def _has_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed, as it does when another rank has left. That rank may tell of it
    later than this one: it lets its connections go before it has told."""
    names = {cls.__name__ for cls in type(error).__mro__ if cls.__module__ == "torch.distributed"}
    return "DistError" in names or any(part in _message(error) for part in _LOST_PEER)


def _memory_that_ran_out(error: BaseException) -> str | None:
    """gpu, host, or None. It is said in many ways, only two of them with a type of their own."""
    if isinstance(error, MemoryError):
        return "host"
    text = _message(error)
    if type(error).__name__ == "OutOfMemoryError":
        return "gpu"
    if isinstance(error, RuntimeError):
        if "DefaultCPUAllocator" in text:
            return "host"
        if "ALLOC_FAILED" in text or ("CUDA" in text.upper() and "out of memory" in text):
            return "gpu"  # cuBLAS; the driver, Triton and NCCL in words of their own
    return None


def timed_out(timeout_s: float, stacks: str) -> Outcome:
    return failed(Status.timeout, "Timeout", f"took more than {timeout_s:g} s", stacks)


def died(exit_code: int | None, traces: str, out_of_memory: bool) -> Outcome:
    """The outcome of a process that ended without writing one.

    Args:
        exit_code: negative is a signal; None where nobody could wait for it.
        traces: stacks of the crash, or the end of its log.
        out_of_memory: its memory cgroup counts a kill more than before it ran.
    """
    if exit_code is None:
        return failed(Status.killed, "ServerDied", LOST["ServerDied"], traces)
    if exit_code >= 0:
        message = f"left with exit code {exit_code} before it returned"
        return failed(Status.error, f"exit code {exit_code}", message, traces)
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    if out_of_memory and exit_code == -signal.SIGKILL:
        message = "the kernel killed it: its memory cgroup is full"
        return failed(Status.oom, name, message, traces, memory="host")
    return failed(Status.killed, name, f"ended by {name}", traces)
