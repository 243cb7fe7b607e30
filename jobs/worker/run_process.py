"""Code that runs in the process of a run: calls the benchmark and writes the outcome as JSON.

The worker describes the run in a `Request`. The benchmark is called in one of three ways:

- Single-process run: the fork server forks a process, which calls `run_alone`.
- Run with several ranks: torchrun starts each rank as `python -m jobs.worker.run_process REQUEST`.
  REQUEST is a JSON file that contains the `Request`.
- Debug run: the worker calls `execute` in its own process.

The worker then makes a record from the outcome.
"""

from __future__ import annotations

import faulthandler
import importlib.metadata
import json
import math
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from jobs.formatting import counted
from jobs.printing import say
from jobs.status import Status
from jobs.sweep.benchmarks import benchmark_module
from jobs.worker.fork_server import DUMP_STACKS, die_with_parent, flush
from jobs.worker.messages import Outcome, Request
from jobs.worker.outcome import deliver, outcome_of
from systems.benchmark import ARTIFACTS

# Environment variable that `systems.benchmark.round_options` reads. It is not imported from there,
# because `systems` may come from an older checkout.
ROUND = "RUN_ROUND"


def become_run(request: Request) -> None:
    """Prepare this process to execute a run.

    The output goes to the run's log, and CUDA_VISIBLE_DEVICES gets the run's GPUs. The OOM score is
    set so that the kernel kills the run rather than the worker if host memory runs out.
    """
    if request.log is not None:
        flush()
        try:
            log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:  # e.g. a full disk: keep writing to the worker's output
            say(
                f"cannot open the run's log {request.log}: {error.strerror}; the output of "
                "the run goes to the job's log",
                sys.stderr,
            )
        else:
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(request.gpus)
    try:  # the OOM killer should choose the run, not its worker
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:
        pass


def watch_stacks(path: Path) -> None:
    """Make this process write the stacks of its threads to a file at a crash or on a signal.

    The signal is DUMP_STACKS. The fork server sends it if a run hangs.
    """
    try:
        file = path.open("w")
    except OSError as error:  # e.g. no free inode: go on without stacks
        say(f"cannot write stacks to {path}: {error.strerror}", sys.stderr)
        return
    faulthandler.register(DUMP_STACKS, file=file, all_threads=True)
    faulthandler.enable(file=file, all_threads=True)


def run_alone(request: Request) -> None:
    """Call a benchmark in this process, and write its outcome to the run's scratch folder.

    This is the main function of the process of a single-process run.
    """
    become_run(request)
    scratch = Path(request.scratch)
    watch_stacks(scratch / "stack0.txt")
    deliver(execute(request), scratch / "outcome0.json")


def run_rank(request_path: Path) -> int:
    """Run one rank of a benchmark, and write its outcome to the run's scratch folder.

    Args:
        request_path: JSON file that describes the run (see `Request`).

    Returns:
        The exit code for this process: 0 if the rank is ok and has written it, otherwise 1.
    """
    request = Request.read(request_path)
    assert request.agent is not None
    die_with_parent(request.agent)
    rank = int(os.environ["RANK"])
    scratch = Path(request.scratch)
    watch_stacks(scratch / f"stack{rank}.txt")
    outcome = execute(request).model_copy(update={"rank": rank})
    delivered = deliver(outcome, scratch / f"outcome{rank}.json")
    return 0 if outcome.is_ok and delivered else 1


def execute(request: Request) -> Outcome:
    """Call the `run` function of a benchmark in this process, and return the outcome.

    Any exception, even SystemExit, is caught. The outcome then describes the failure.
    """
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
        _check_gpus(request.gpus)
        if request.gpus:
            _watch_gpu_memory(oom)
        # JSON stores a tuple as a list. Strict models accept a list for a tuple only in JSON mode.
        params = module.Params.model_validate_json(json.dumps(request.params))
        called = time.monotonic()
        starting = called - request.asked_at
        facts = module.run(params)
        measuring = time.monotonic() - called
        if not isinstance(facts, dict):
            raise TypeError(f"run() must return a dict, got {type(facts).__name__}")
        _check_plain(facts, "facts")
        outcome = Outcome(status=Status.ok, measurements=facts)
    except BaseException as error:  # also SystemExit: a run that exits early has no result
        if called is not None:
            measuring = time.monotonic() - called
        outcome = outcome_of(error, oom, _noted("failed_phase"))
        say("".join(traceback.format_exception(error)).rstrip(), sys.stderr)
    known = {"starting": starting, "measuring": measuring, "versions": _loaded_versions()}
    known |= {"windows": _noted("windows") or {}, "not_imported": _not_imported(request.sources)}
    return outcome.model_copy(update=known | {"ended_at": time.time()})


def _noted(function: str) -> Any:
    """Call a function of `systems.measure.windows`, if the benchmark has imported this module."""
    module = sys.modules.get("systems.measure.windows")
    return None if module is None else getattr(module, function)()


def _not_imported(sources: list[str]) -> list[str]:
    """Return those of some files of which this process has no module."""
    if not sources:
        return []
    modules = (getattr(module, "__dict__", {}) for module in list(sys.modules.values()))
    imported = {_identity(file) for module in modules if (file := module.get("__file__"))}
    return [path for path in sources if _identity(path) not in imported]


def _identity(path: str) -> tuple[int, int] | None:
    try:
        about = os.stat(path)
    except (OSError, TypeError, ValueError):  # a file that is gone, or no path
        return None
    return about.st_dev, about.st_ino


def _check_plain(fact: Any, name: str) -> None:
    """Raise an error if a value that a benchmark returned cannot be stored as JSON.

    Error messages call it `name`, for example "facts.samples_ms".
    """
    if isinstance(fact, dict):
        for key, value in fact.items():
            if not isinstance(key, str):
                raise TypeError(f"keys of {name} must be strings, got {key!r}")
            _check_plain(value, f"{name}.{key}")
    elif isinstance(fact, (list, tuple)):
        for i, value in enumerate(fact):
            _check_plain(value, f"{name}[{i}]")
    elif isinstance(fact, float):
        if not math.isfinite(fact):
            raise ValueError(f"{name} must be a finite number, got {fact}")
    elif isinstance(fact, str):
        fact.encode()
    elif not isinstance(fact, (int, type(None))):
        kind = f"{type(fact).__module__}.{type(fact).__name__}"
        raise TypeError(
            f"{name} must be a number, string, list, dict or None, got a {kind}; "
            "convert it to one of these types"
        )


def _check_gpus(gpus: list[str]) -> None:
    """Raise an error if CUDA cannot use the GPUs, so that no run falls back to the CPU."""
    if gpus:
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


def _watch_gpu_memory(oom: dict[str, int]) -> None:
    """Observe GPU allocations of torch, and store information about an allocation that fails.

    In `oom`, "requested_bytes" is the size of the allocation, and "allocated_bytes" is the memory
    that torch had allocated.
    """
    torch = sys.modules.get("torch")
    attach = getattr(getattr(torch, "_C", None), "_cuda_attach_out_of_memory_observer", None)
    if torch is None or attach is None or not torch.cuda.is_available():
        return

    def observe(device: int, requested: int, *_: int) -> None:
        oom["requested_bytes"] = int(requested)
        oom["allocated_bytes"] = int(torch.cuda.memory_allocated(device))

    torch.cuda.init()
    attach(observe)


def _loaded_versions() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None:
        return {}
    versions: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        versions["cudnn"] = torch.backends.cudnn.version()
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    try:
        versions["triton"] = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        versions["triton"] = None
    return versions


if __name__ == "__main__":
    code = run_rank(Path(sys.argv[1]))
    flush()
    os._exit(code)  # skip exit handlers and threads that may hang, as for a single-process run
