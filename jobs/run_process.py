"""What happens inside a run's own process: call the benchmark, write down how it ended.

A single-process run gets here by a fork from the warm server (`jobs.isolation`), a rank of several
by `python -m jobs.run_process REQUEST` under torchrun (`jobs.torchrun`), a debug run by a plain call
of `execute`. The outcome is a small JSON file; only the worker turns outcomes into records.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib.metadata
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jobs.benchmarks import benchmark_module
from jobs.record import write_json

DUMP_STACKS = signal.SIGUSR1  # the worker sends it before it kills a run that hangs
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Request:
    """One run, as its process is told of it."""

    benchmark: str
    params: dict[str, Any]
    scratch: str  # a folder on this node for outcomes and stacks; gone after the run
    gpus: list[str]  # what the run may see; none means CPU
    token: str  # in the environment of every process of this run, so that all can be found
    log: str | None = None  # file that takes stdout and stderr; None: the terminal
    # Several processes (jobs.torchrun):
    nproc_per_node: int | None = None
    nodes: int = 1
    node_rank: int = 0
    host: str = "127.0.0.1"  # this node's address
    endpoint: str | None = None  # host:port of the rendezvous; None: this node opens it

    def dump(self, path: Path) -> Path:
        write_json(path, asdict(self))
        return path


TOKEN_VARIABLE = "JOBS_RUN_TOKEN"


def become_child(request: Request) -> None:
    """Make this process a run: a session of its own, dying with its parent, output in its log."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the fork server runs with signals blocked
    for caught in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(caught, signal.SIG_DFL)
    os.setsid()  # Slurm's warning signal goes to the worker's session and must not end the run
    die_with_parent()
    if request.log is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    os.environ[TOKEN_VARIABLE] = request.token
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(request.gpus)
    try:  # where memory runs out, the kernel should end the run and not its worker
        Path("/proc/self/oom_score_adj").write_text("1000")
    except OSError:
        pass


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends: no run outlives its worker."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # the parent ended before the call
        os._exit(1)


def watch_stacks(path: Path) -> None:
    """Write every thread's stack to `path` on DUMP_STACKS and on a crash."""
    file = path.open("w")
    faulthandler.register(DUMP_STACKS, file=file, all_threads=True)
    faulthandler.enable(file=file, all_threads=True)


def run_alone(request: Request) -> None:
    """The main function of a single-process run's process."""
    become_child(request)
    scratch = Path(request.scratch)
    watch_stacks(scratch / "stack0.txt")
    write_json(scratch / "outcome0.json", execute(request.benchmark, request.params, request.gpus))
    sys.stdout.flush()
    sys.stderr.flush()


def run_rank(request_path: Path) -> int:
    """The main function of one rank under torchrun."""
    die_with_parent()
    request = Request(**json.loads(request_path.read_text()))
    rank = int(os.environ["RANK"])
    scratch = Path(request.scratch)
    watch_stacks(scratch / f"stack{rank}.txt")
    outcome = execute(request.benchmark, request.params, request.gpus)
    write_json(scratch / f"outcome{rank}.json", outcome | {"rank": rank})
    return 0 if outcome["status"] == "ok" else 1


def execute(benchmark: str, params: dict[str, Any], gpus: list[str]) -> dict[str, Any]:
    """Call a benchmark's `run` here. Never raises: every end is an outcome.

    Returns:
        status, and measurements or failure; called_at and ended_at (seconds since the epoch);
        versions of what was loaded.
    """
    outcome: dict[str, Any] = {"called_at": time.time()}
    oom: dict[str, int] = {}
    try:
        module = benchmark_module(benchmark)
        _check_gpus(gpus)
        if gpus:
            _watch_gpu_memory(oom)
        outcome["called_at"] = time.time()
        facts = module.run(module.Params.model_validate(params))
        if not isinstance(facts, dict):
            raise TypeError(
                f"{benchmark}.run returned {type(facts).__name__}, expected a dict of facts"
            )
        json.dumps(facts, allow_nan=False)  # a fact that is no plain number fails here, by name
        outcome |= {"status": "ok", "measurements": facts}
    except BaseException as error:  # SystemExit too: a run that leaves early has not measured
        traceback.print_exc()
        outcome |= describe(error, oom)
    outcome["ended_at"] = time.time()
    outcome["versions"] = _loaded_versions()
    return outcome


def describe(error: BaseException, oom: dict[str, int] | None = None) -> dict[str, Any]:
    """The status and failure that an exception stands for."""
    failure: dict[str, Any] = {
        "type": type(error).__name__,
        "message": str(error)[:4000],
        "traceback": "".join(traceback.format_exception(error))[-16000:],
    }
    memory = _memory_that_ran_out(error)
    names = {
        cls.__name__ for cls in type(error).__mro__ if cls.__module__ == "systems.benchmarks.base"
    }
    if memory is not None:
        failure |= {"memory": memory} | (oom or {})
        return {"status": "oom", "failure": failure}
    if "Unsupported" in names:
        return {"status": "unsupported", "failure": failure}
    if "WrongOutput" in names:
        return {"status": "wrong", "failure": failure}
    return {"status": "error", "failure": failure}


def _memory_that_ran_out(error: BaseException) -> str | None:
    """gpu, host, or None. torch says it in four ways, only one of them with a type of its own."""
    if isinstance(error, MemoryError):
        return "host"
    text = str(error)
    if type(error).__name__ == "OutOfMemoryError":
        return "gpu"
    if isinstance(error, RuntimeError):
        if "DefaultCPUAllocator" in text:
            return "host"
        if "CUDA error: out of memory" in text or "ALLOC_FAILED" in text:
            return "gpu"
    return None


def _check_gpus(gpus: list[str]) -> None:
    """A run that was given GPUs must not measure the CPU because a driver is broken."""
    if gpus and "torch" in sys.modules:
        seen = sys.modules["torch"].cuda.device_count()
        if seen < len(gpus):
            raise RuntimeError(
                f"this job was given {len(gpus)} GPUs (CUDA_VISIBLE_DEVICES={','.join(gpus)}), "
                f"but torch sees {seen}"
            )


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
    sys.exit(run_rank(Path(sys.argv[1])))
