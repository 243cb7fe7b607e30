"""Code that runs in the process of a run: calls the benchmark and writes the outcome as JSON.

The worker describes the run in a `Request`. The benchmark is called in one of three ways:

- Single-process run: the fork server forks a process, which calls `run_alone`.
- Run with several ranks: torchrun starts each rank as `python -m jobs.worker.run_process REQUEST`.
- Debug run: the worker calls `execute` in its own process.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

from jobs.formatting import counted
from jobs.printing import say
from jobs.provenance import packages
from jobs.status import Status
from jobs.sweep.benchmarks import benchmark_module
from jobs.versions import untested
from jobs.worker.fork_server import die_with_parent, flush
from jobs.worker.messages import Outcome, Request
from jobs.worker.outcome import outcome_of
from jobs.worker.scratch import deliver, outcome_file, watch_stacks
from systems.benchmark import ARTIFACTS

MAX_DEPTH, MAX_BITS = 100, 1024  # of facts; JSON readers have such limits
# Environment variable that `systems.benchmark.round_options` reads. It is not imported from there,
# because `systems` may come from an older checkout.
ROUND = "RUN_ROUND"


def become_run(request: Request) -> None:
    """Prepare this process to execute a run: its output, its GPUs and its OOM score."""
    if request.log is not None:
        flush()
        try:
            log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:  # e.g. a full disk: keep writing to the worker's output
            why = f"cannot open the run's log {request.log}: {error.strerror}"
            say(f"{why}; the output of the run goes to the job's log", sys.stderr)
        else:
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(request.gpus)
    with suppress(OSError):  # the OOM killer should choose the run, not its worker
        Path("/proc/self/oom_score_adj").write_text("1000")


def run_alone(request: Request) -> None:
    """Call a benchmark. This is the main function of the process of a single-process run."""
    become_run(request)
    scratch = Path(request.scratch)
    watch_stacks(scratch / "stack0.txt")
    deliver(execute(request), outcome_file(scratch))


def run_rank(request_path: Path) -> int:
    """Call a benchmark in one rank. Return its exit code: 0 if it is ok and has written so."""
    request = Request.read(request_path)
    assert request.agent is not None
    die_with_parent(request.agent)
    rank = int(os.environ["RANK"])
    scratch = Path(request.scratch)
    watch_stacks(scratch / f"stack{rank}.txt")
    outcome = execute(request).model_copy(update={"rank": rank})
    delivered = deliver(outcome, outcome_file(scratch, rank))
    return 0 if outcome.is_ok and delivered else 1


def execute(request: Request) -> Outcome:
    """Call the `run` function of a benchmark in this process. Any exception becomes the outcome."""
    oom: dict[str, int] = {}
    _noted("forget")  # what an earlier run in this process noted
    called = starting = measuring = None
    os.environ[ARTIFACTS] = request.artifacts
    os.environ.pop(ROUND, None)
    if request.round_options is not None:
        os.environ[ROUND] = json.dumps(request.round_options)
    try:
        module = benchmark_module(request.benchmark)
        version = getattr(module, "VERSION", 1)
        if version != request.version:
            raise RuntimeError(
                f"{request.benchmark} is at version {version} here, but the run was submitted for "
                f"version {request.version}; submit the sweep again"
            )
        if request.gpus:
            _require_gpus(request.gpus, oom)
        # JSON stores a tuple as a list. Strict models accept a list for a tuple only in JSON mode.
        params = module.Params.model_validate_json(json.dumps(request.params))
        called = time.monotonic()
        starting = called - request.asked_at
        result = module.run(params)
        measuring = time.monotonic() - called
        if not isinstance(result, dict):
            raise TypeError(f"run() must return a dict, got {type(result).__name__}")
        _check_plain(result, "result")
        outcome = Outcome(status=Status.ok, measurements=result)
    except BaseException as error:  # also SystemExit: a run that exits early has no result
        if request.agent is not None:  # torchrun ends all ranks, but this one must say why first
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if called is not None:
            measuring = time.monotonic() - called
        outcome = outcome_of(error, oom, _noted("failed_phase"))
        say("".join(traceback.format_exception(error)).rstrip(), sys.stderr)
    known: dict[str, Any] = {
        "starting": starting,
        "measuring": measuring,
        "versions": _loaded_versions(),
        "windows": _noted("windows") or {},
        "ended_at": time.time(),
    }
    return outcome.model_copy(update=known)


def _noted(function: str) -> Any:
    """Call a function of `systems.measure.windows`, if the benchmark has imported this module."""
    module = sys.modules.get("systems.measure.windows")
    return None if module is None else getattr(module, function)()


def _check_plain(fact: Any, name: str, depth: int = 0) -> None:
    """Raise an error if a value that a benchmark returned cannot be stored as JSON."""
    if depth > MAX_DEPTH:
        raise ValueError(f"facts must not be nested more than {MAX_DEPTH} levels deep")
    if isinstance(fact, dict):
        for key, value in fact.items():
            if not isinstance(key, str):
                raise TypeError(f"keys of {name} must be strings, got {key!r}")
            key.encode()
            _check_plain(value, f"{name}.{key}", depth + 1)
    elif isinstance(fact, (list, tuple)):
        for i, value in enumerate(fact):
            _check_plain(value, f"{name}[{i}]", depth + 1)
    elif isinstance(fact, float):
        if not math.isfinite(fact):
            raise ValueError(f"{name} must be a finite number, got {fact}")
    elif isinstance(fact, int):
        if fact.bit_length() > MAX_BITS:
            raise ValueError(f"{name} must have at most {MAX_BITS} bits, got {fact.bit_length()}")
    elif isinstance(fact, str):
        fact.encode()  # raises UnicodeEncodeError for a lone surrogate
    elif fact is not None:
        kind = f"{type(fact).__module__}.{type(fact).__name__}"
        raise TypeError(
            f"{name} must be a number, string, list, dict or None, got a {kind}; "
            "convert it to one of these types"
        )


def _require_gpus(gpus: list[str], oom: dict[str, int]) -> None:
    """Raise an error if CUDA cannot use the GPUs, so that no run falls back to the CPU.

    If torch then fails to allocate GPU memory, the sizes are stored in `oom`, as in `Failure`.
    """
    import torch

    seen = torch.cuda.device_count()
    if seen < len(gpus):
        raise RuntimeError(
            f"this job was given {counted(len(gpus), 'GPU')} "
            f"(CUDA_VISIBLE_DEVICES={','.join(gpus)}), "
            f"but torch sees {seen}; check the driver and torch's CUDA version on this node"
        )
    # device_count() also counts GPUs that the driver lists but cannot initialize. Without this
    # call, the benchmark would then find no CUDA and measure the CPU.
    torch.cuda.init()

    def observe(device: int, requested: int, *_: int) -> None:
        oom["requested_bytes"] = int(requested)
        oom["allocated_bytes"] = int(torch.cuda.memory_allocated(device))

    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is not None:  # it is not public, so a later torch may lack it
        attach(observe)


def _loaded_versions() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    versions: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        versions["cudnn"] = torch.backends.cudnn.version()
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    versions["triton"] = packages()["triton"]
    if unknown := untested(versions):
        versions["untested"] = ", ".join(unknown)
    return versions


if __name__ == "__main__":
    code = run_rank(Path(sys.argv[1]))
    flush()
    os._exit(code)  # skip exit handlers and threads that may hang, as for a single-process run
