"""Outcomes of runs, made from exceptions, exit codes and reasons for which a run was stopped."""

from __future__ import annotations

import signal
import traceback
from typing import Any, Literal

from jobs.processes import signal_name
from jobs.results.record import Failure, Record
from jobs.results.unwritable import FULL
from jobs.status import Status
from jobs.worker.messages import NodeReport, Outcome
from systems.benchmark import Unsupported, WrongOutput

TEXT = 16000  # maximum length of the traceback in a record, in characters
_LOST_PEER = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")


def failed(
    status: Status, kind: str, message: str, trace: str | None = None, **more: Any
) -> Outcome:
    """Return the outcome of a run that failed. The arguments are fields of `Failure`."""
    failure = Failure(type=kind, message=message, traceback=trace or None, **more)
    return Outcome(status=status, failure=failure)


def outcome_of(
    error: BaseException, oom: dict[str, int] | None = None, phase: str | None = None
) -> Outcome:
    """Return the outcome of a run that raised an exception. `oom` is from the GPU's allocator."""
    if isinstance(error, MemoryError):  # free memory, which the next lines need
        traceback.clear_frames(error.__traceback__)
    text = "".join(traceback.format_exception(error))
    failure = Failure(
        type=type(error).__name__,
        message=_message(error)[:4000],
        traceback=text[-TEXT:],
        phase=phase,
    )
    memory = _memory_that_ran_out(error)
    if memory is not None:
        failure = failure.model_copy(update={"memory": memory, **(oom or {})})
        status = Status.oom
    elif isinstance(error, Unsupported):
        status = Status.unsupported
    elif isinstance(error, OSError) and error.errno in FULL:
        status = Status.killed  # not the benchmark's fault; the same command repeats the run
    else:
        status = Status.wrong if isinstance(error, WrongOutput) else Status.error
    return Outcome(status=status, failure=failure, lost_peer=_has_lost_peer(error))


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as second:  # the exception's __str__ raises
        return f"(no message: str() of the exception raised {type(second).__name__})"


def _has_lost_peer(error: BaseException) -> bool:
    """Return whether an exception comes from a failed collective, as when another rank has ended.

    That rank closes its connections before it reports its outcome, so times do not show the first.
    """
    names = {cls.__name__ for cls in type(error).__mro__ if cls.__module__ == "torch.distributed"}
    return "DistError" in names or any(part in _message(error) for part in _LOST_PEER)


def _memory_that_ran_out(error: BaseException) -> str | None:
    """Return the memory that ran out ("gpu" or "host"), or None if the error has another cause."""
    if isinstance(error, MemoryError):
        return "host"
    text = _message(error)
    if type(error).__name__ == "OutOfMemoryError":
        return "gpu"
    if isinstance(error, RuntimeError):
        if "DefaultCPUAllocator" in text:
            return "host"
        if "ALLOC_FAILED" in text or ("CUDA" in text.upper() and "out of memory" in text):
            return "gpu"  # first text: cuBLAS; second text: driver, Triton, NCCL
    return None


def timed_out(timeout_s: float, stacks: str) -> Outcome:
    message = (
        f"took longer than {timeout_s:g} s; if it does not hang, raise timeout_s in the sweep and "
        "repeat the submit command with --retry-failed"
    )
    return failed(Status.timeout, "Timeout", message, stacks)


def stopped(
    reason: Literal["preempted", "cancelled", "limit"], timeout_min: int, is_first: bool
) -> Outcome:
    """Return the outcome of a run that its worker stops because the job ends.

    At the job's time limit, the first run that a worker executes had almost the whole time for
    itself, so its status is timeout. A later run is preempted, and repeated.
    """
    if reason == "limit" and is_first:
        message = (
            f"takes longer than the job's time limit of {timeout_min} min; raise "
            "resources.timeout_min in the sweep and repeat the submit command with --retry-failed"
        )
        return failed(Status.timeout, "Limit", message)
    again = "this run is repeated when the job is requeued or the sweep is submitted again"
    if reason == "limit":
        return failed(Status.preempted, "Limit", f"the job reached its time limit; {again}")
    if reason == "preempted":
        return failed(Status.preempted, "Preempted", f"Slurm preempted the job; {again}")
    message = "the job was cancelled or interrupted; submit the sweep again to repeat this run"
    return failed(Status.cancelled, "Cancelled", message)


def not_repeated(before: Record) -> Outcome:
    """Return the outcome of a run that is not executed: an earlier attempt says how it ends."""
    failure, place = before.failure, before.block
    assert failure is not None and place is not None
    where = "the trial" if place.trial else f"round {place.round + 1}"
    message = f"not executed again, because it ended so in {where}: {failure.message}"
    why = failure.model_copy(update={"message": message, "traceback": None})
    return Outcome(status=before.status, failure=why)


def outcome_of_process(report: NodeReport, expired: bool, timeout_s: float) -> Outcome:
    """Return the outcome of a run of one process. `expired`: it was killed at its timeout."""
    if report.outcomes:
        return report.outcomes[0]
    if report.unable is not None:
        return report.unable
    if expired:
        return timed_out(timeout_s, report.stacks)
    return died(report.exit_code, report.stacks or report.log_end, report.out_of_memory)


def died(exit_code: int, traces: str, out_of_memory: bool) -> Outcome:
    """Return the outcome of a process that ended without a result."""
    if exit_code >= 0:
        code = f"exit code {exit_code}"
        message = f"exited with {code} before it reported a result; see `python -m jobs logs`"
        return failed(Status.error, code, message, traces)
    name = signal_name(-exit_code)
    if out_of_memory and exit_code == -signal.SIGKILL:
        message = (
            "host memory ran out: the kernel killed the process because its memory cgroup was "
            "full; make the run smaller or, on Slurm, submit the sweep again with --retry-failed "
            "and a larger resources.mem_gb"
        )
        return failed(Status.oom, name, message, traces, memory="host")
    message = f"the process was terminated by {name}; see `python -m jobs logs`"
    return failed(Status.killed, name, message, traces)
