"""What happens inside a run's own process: call the benchmark, write down how it ended.

A single-process run gets here by a fork from the warm server (`isolation`), a rank of several by
`python -m jobs.worker.run_process REQUEST` under torchrun (`torchrun`), a debug run by a call of
`execute`. The outcome is a small JSON file; only the worker turns outcomes into records.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jobs.json_files import write_json
from jobs.status import Status
from jobs.sweep.benchmarks import benchmark_module
from jobs.worker.fork_server import DUMP_STACKS, die_with_parent, flush
from jobs.worker.outcome import Outcome, outcome_of
from systems.benchmark import ARTIFACTS


@dataclass(frozen=True)
class Request:
    """One attempt of one run, as its processes are told of it."""

    benchmark: str
    version: int  # of the benchmark, as submitted
    params: dict[str, Any]
    scratch: str  # a folder on this node for outcomes and stacks; gone after the run
    gpus: list[str]  # what the run may see; none means CPU
    artifacts: str  # folder for what it leaves, shared by all nodes; made by who writes there
    token: str  # names this attempt among the nodes
    asked_at: float  # by node 0's monotonic clock
    log: str | None = None  # file that takes stdout and stderr; None: the terminal
    # Several processes (jobs.worker.torchrun):
    nproc_per_node: int | None = None
    nodes: int = 1
    node_rank: int = 0
    host: str = "127.0.0.1"  # this node's address
    endpoint: str | None = None  # host:port of the rendezvous; None: this node opens it
    agent: int | None = None  # process that starts this node's ranks

    @property
    def world_size(self) -> int:
        return self.nodes * (self.nproc_per_node or 1)

    def dump(self, path: Path) -> Path:
        write_json(path, asdict(self))
        return path


def become_run(request: Request) -> None:
    """Make this process the run's: its output, its GPUs, and first to go where memory runs out."""
    if request.log is not None:
        flush()
        try:
            log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:  # a full disk: the worker's own output will do
            print(f"cannot open {request.log}: {error.strerror}", file=sys.stderr)
        else:
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(request.gpus)
    try:  # the kernel should end the run and not its worker
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:
        pass


def watch_stacks(path: Path) -> None:
    """Write every thread's stack to `path` on DUMP_STACKS and on a crash."""
    file = path.open("w")
    faulthandler.register(DUMP_STACKS, file=file, all_threads=True)
    faulthandler.enable(file=file, all_threads=True)


def run_alone(request: Request) -> None:
    """The main function of a single-process run's process."""
    become_run(request)
    scratch = Path(request.scratch)
    watch_stacks(scratch / "stack0.txt")
    execute(request).write(scratch / "outcome0.json")


def run_rank(request_path: Path) -> int:
    """The main function of one rank under torchrun."""
    request = Request(**json.loads(request_path.read_text()))
    assert request.agent is not None
    die_with_parent(request.agent)
    rank = int(os.environ["RANK"])
    scratch = Path(request.scratch)
    watch_stacks(scratch / f"stack{rank}.txt")
    outcome = execute(request).model_copy(update={"rank": rank})
    outcome.write(scratch / f"outcome{rank}.json")
    return 0 if outcome.is_ok else 1


def execute(request: Request) -> Outcome:
    """Call the benchmark's `run` here. Never raises: every end is an outcome."""
    oom: dict[str, int] = {}
    called = starting = measuring = None
    os.environ[ARTIFACTS] = request.artifacts
    try:
        module = benchmark_module(request.benchmark)
        version = getattr(module, "VERSION", 1)
        if version != request.version:
            raise RuntimeError(
                f"{request.benchmark} is at version {version} here, and this was submitted for "
                f"version {request.version}; submit it again"
            )
        _check_gpus(request.gpus)
        if request.gpus:
            _watch_gpu_memory(oom)
        # As JSON, so that a list stands for a tuple: Params are strict, and were written as JSON.
        params = module.Params.model_validate_json(json.dumps(request.params))
        called = time.monotonic()
        starting = called - request.asked_at
        facts = module.run(params)
        measuring = time.monotonic() - called
        if not isinstance(facts, dict):
            raise TypeError(f"run returned {type(facts).__name__}, expected a dict of facts")
        _check_plain(facts, "facts")
        outcome = Outcome(status=Status.ok, measurements=facts)
    except BaseException as error:  # SystemExit too: a run that leaves early has not measured
        if called is not None:
            measuring = time.monotonic() - called
        outcome = outcome_of(error, oom)
        _print_traceback(error)
    known = {"starting": starting, "measuring": measuring, "versions": _loaded_versions()}
    return outcome.model_copy(update=known | {"ended_at": time.time()})


def _print_traceback(error: BaseException) -> None:
    try:
        traceback.print_exception(error)
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):  # the benchmark closed it, or the disk is full
        pass


def _check_plain(fact: Any, name: str) -> None:
    """Raise, naming the fact, unless it is what JSON can hold and a table can use."""
    if isinstance(fact, dict):
        for key, value in fact.items():
            if not isinstance(key, str):
                raise TypeError(f"{name} has the key {key!r}, expected text")
            _check_plain(value, f"{name}.{key}")
    elif isinstance(fact, (list, tuple)):
        for i, value in enumerate(fact):
            _check_plain(value, f"{name}[{i}]")
    elif isinstance(fact, float):
        if not math.isfinite(fact):
            raise ValueError(f"{name} is {fact}, expected a finite number")
    elif isinstance(fact, str):
        fact.encode()
    elif not isinstance(fact, (int, type(None))):
        kind = f"{type(fact).__module__}.{type(fact).__name__}"
        raise TypeError(f"{name} is a {kind}, expected a number, text, list or dict")


def _check_gpus(gpus: list[str]) -> None:
    """A run that was given GPUs must not measure the CPU because a driver is broken."""
    if gpus:
        import torch

        seen = torch.cuda.device_count()
        if seen < len(gpus):
            raise RuntimeError(
                f"this job was given {len(gpus)} GPUs (CUDA_VISIBLE_DEVICES={','.join(gpus)}), "
                f"but torch sees {seen}"
            )
        # It counts what the driver lists; a driver that does not start would leave the benchmark
        # to find no CUDA, and take the CPU.
        torch.cuda.init()


def _watch_gpu_memory(oom: dict[str, int]) -> None:
    """Note what the allocation that fails asked for, and what was allocated then."""
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
    os._exit(code)  # as for a run alone: threads that hang at exit have nothing more to say
