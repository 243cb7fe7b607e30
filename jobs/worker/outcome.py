"""Outcomes of runs, built from exceptions, exit codes and the files that the processes write.

Nothing here starts a process, reads the clock or prints.
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

TEXT = 16000  # limit on the traceback in a record, in characters
_LOST_PEER = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")
LOST = {
    "ServerDied": "the fork server, the parent of this run's process, ended unexpectedly; "
    "see the job's log, and submit the sweep again to repeat the run",
    "NodeLost": "the worker on another node of the job ended or lost its connection; "
    "see that node's log, and submit the sweep again to repeat the run",
}


def _without_models(value: Any) -> Any:
    """Convert the models in a field to dicts, so that json.dump accepts it.

    Facts may contain lone surrogates and deep nesting, which pydantic's JSON serializer rejects.
    """
    if isinstance(value, list):
        return [_without_models(item) for item in value]
    return value.model_dump() if isinstance(value, BaseModel) else value


class _Message(BaseModel):
    """A message from a run's processes to the worker: JSON in a file, or sent through a socket."""

    model_config = ConfigDict(frozen=True)

    def write(self, path: Path) -> None:
        write_json(path, {name: _without_models(value) for name, value in self})

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls.model_validate(json.loads(path.read_bytes()))


class Outcome(_Message):
    """How one run, or one rank of it, ended: with measurements if ok, otherwise with a failure."""

    status: Status
    measurements: dict[str, Any] | None = None  # facts that the benchmark returned
    failure: Failure | None = None
    # Known only if the benchmark's process reported its outcome itself:
    starting: float | None = None  # from the start of the attempt to the call of run(), in seconds
    measuring: float | None = None  # time inside run(), in seconds
    ended_at: float = 0.0  # in seconds since the epoch
    versions: dict[str, Any] = {}  # versions of the libraries that were loaded
    rank: int = 0
    lost_peer: bool = False  # whether a collective failed, as when another rank has ended

    @property
    def is_ok(self) -> bool:
        return self.status is Status.ok


class RankFailure(_Message):
    """A failed rank, as torchrun's agent reports it."""

    rank: int
    exit_code: int  # negative: killed by that signal
    at: float  # in seconds since the epoch


class AgentReport(_Message):
    """How torchrun's agent on one node ended."""

    failures: list[RankFailure] = []
    error: str | None = None  # error of the agent itself

    @property
    def is_ok(self) -> bool:
        return not self.failures and self.error is None


class NodeReport(_Message):
    """Result of one run on one node: the reports of the torchrun agent and of its ranks."""

    token: str  # identifies the attempt
    exit_code: int | None = 0  # exit code of the agent; 0 if it had to be killed
    agent: AgentReport | None = None  # None: the agent ended without a report
    outcomes: list[Outcome] = []
    stacks: str = ""
    log_end: str = ""
    out_of_memory: bool = False  # whether the OOM killer killed a process of the job
    lost: Literal["ServerDied", "NodeLost"] | None = None  # set if the server or node was lost

    @property
    def is_ok(self) -> bool:
        return self.agent is not None and self.agent.is_ok


def failed(
    status: Status, kind: str, message: str, trace: str | None = None, **more: Any
) -> Outcome:
    """Return an outcome without measurements. `more` holds further fields of `Failure`."""
    failure = Failure(type=kind, message=message, traceback=trace or None, **more)
    return Outcome(status=status, failure=failure)


def outcome_of(error: BaseException, oom: dict[str, int] | None = None) -> Outcome:
    """Return the outcome of a run that raised an exception.

    Args:
        error: the exception.
        oom: fields of `Failure` about the failed GPU allocation; used if memory ran out.
    """
    if isinstance(error, MemoryError):  # frees what the frames hold: the report needs memory
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
    except Exception as second:  # the exception's __str__ raises
        return f"(no message: str() of the exception raised {type(second).__name__})"


def _plain_text(text: str) -> str:
    """Escape lone surrogates, e.g. from undecodable bytes in a path. UTF-8 cannot encode them."""
    return text.encode(errors="backslashreplace").decode()


def _has_lost_peer(error: BaseException) -> bool:
    """Return whether a collective failed, as it does when another rank has ended.

    The rank that ended may report later than this one, since it closes its connections first.
    """
    names = {cls.__name__ for cls in type(error).__mro__ if cls.__module__ == "torch.distributed"}
    return "DistError" in names or any(part in _message(error) for part in _LOST_PEER)


def _memory_that_ran_out(error: BaseException) -> str | None:
    """Return which memory ran out, "gpu" or "host"; None if the error has another cause.

    Only two kinds of this error have an exception type. The others are recognized by their text.
    """
    if isinstance(error, MemoryError):
        return "host"
    text = _message(error)
    if type(error).__name__ == "OutOfMemoryError":
        return "gpu"
    if isinstance(error, RuntimeError):
        if "DefaultCPUAllocator" in text:
            return "host"
        if "ALLOC_FAILED" in text or ("CUDA" in text.upper() and "out of memory" in text):
            return "gpu"  # the first is cuBLAS's text, the second the driver's, Triton's or NCCL's
    return None


def timed_out(timeout_s: float, stacks: str) -> Outcome:
    return failed(
        Status.timeout,
        "Timeout",
        f"took longer than {timeout_s:g} s; if it does not hang, raise timeout_s in the sweep and "
        "submit with --retry-failed",
        stacks,
    )


def died(exit_code: int | None, traces: str, out_of_memory: bool) -> Outcome:
    """Return the outcome of a process that ended without writing one.

    Args:
        exit_code: negative if a signal killed the process; None if the fork server ended first.
        traces: stacks of the crash, or the end of the log.
        out_of_memory: whether the OOM killer killed a process of its memory cgroup during the run.
    """
    if exit_code is None:
        return failed(Status.killed, "ServerDied", LOST["ServerDied"], traces)
    if exit_code >= 0:
        message = (
            f"exited with exit code {exit_code} before it reported a result; "
            "see `python -m jobs logs`"
        )
        return failed(Status.error, f"exit code {exit_code}", message, traces)
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    if out_of_memory and exit_code == -signal.SIGKILL:
        message = (
            "host memory ran out: the kernel killed the process because its memory cgroup was "
            "full; make the run smaller or, on Slurm, raise resources.mem_gb in the sweep"
        )
        return failed(Status.oom, name, message, traces, memory="host")
    return failed(
        Status.killed,
        name,
        f"the process was terminated by {name}; see `python -m jobs logs`",
        traces,
    )
