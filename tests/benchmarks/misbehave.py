"""A benchmark whose runs end in every possible way, for the tests of workers and clusters."""

from __future__ import annotations

import ctypes
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from systems.benchmark import (
    BenchmarkParams,
    Unsupported,
    WrongOutput,
    artifacts_folder,
)

VERSION = 1
PRELOAD = ()


class Params(BenchmarkParams):
    what: str = "ok"  # the name of one of the functions below
    tag: int = 0  # distinguishes runs with the same action
    rank: int | None = None  # the rank that does the action, -1 for all; the others wait for it
    deaf: bool = False  # the other ranks ignore SIGTERM
    gloo: bool = False  # the ranks synchronize through torch's Gloo backend, else through sockets
    path: str = ""  # a file to write, or a FIFO that tells its reader that the run has started
    artifact: str = ""  # name of an artifact that each rank writes before its action
    pair: tuple[int, int] = (1, 2)  # must stay a tuple, although JSON has none
    until: str = ""  # wait first until this file exists; "requeued": until the job is requeued
    later: bool = False  # wait only after the trial of a block and the first round of a worker


def run(params: Params) -> dict[str, Any]:
    assert params.pair == (1, 2)
    if not params.later or _is_later(params):
        while not _may_go_on(params.until):
            time.sleep(0.05)
    if params.artifact:
        rank = os.environ.get("RANK", "")
        (artifacts_folder() / f"{params.artifact}{rank}").write_text("a trace")
    if "RANK" in os.environ:
        return _run_rank(params)
    return facts() | (globals()[params.what](params) or {})


def _run_rank(params: Params) -> dict[str, Any]:
    if not params.gloo:
        return _act(params, Peers().barrier)
    import torch.distributed as dist

    from systems.process_group import process_group

    with process_group("gloo"):
        return _act(params, dist.barrier)


def _act(params: Params, barrier: Callable[[], object]) -> dict[str, Any]:
    rank = int(os.environ["RANK"])
    barrier()
    if params.rank in (rank, -1):
        globals()[params.what](params)
    elif params.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        hang_in_python(params)
    barrier()
    return facts() | {
        "samples_ms": {"call": [rank + 1.0, rank + 1.0]},
        "peak_memory_bytes": {"call": rank + 10},
    }


def _is_later(params: Params) -> bool:
    if json.loads(os.environ["RUN_ROUND"])["check"]:
        return False
    try:
        open(f"round-{params.tag}-{os.getppid()}", "x").close()
    except FileExistsError:
        return True
    return False


def _may_go_on(until: str) -> bool:
    if until == "requeued":
        return "SLURM_RESTART_COUNT" in os.environ
    return not until or Path(until).exists()


class Peers:
    """A barrier between the ranks of a run on one machine, through sockets to rank 0."""

    def __init__(self) -> None:
        name = "\0" + os.environ["TORCHELASTIC_RUN_ID"]
        others = int(os.environ["WORLD_SIZE"]) - 1
        self._leads = os.environ["RANK"] == "0"
        if self._leads:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(name)
            listener.listen()
            self._connections = [listener.accept()[0] for _ in range(others)]
            return
        self._connections = [socket.socket(socket.AF_UNIX)]
        while self._connections[0].connect_ex(name):
            time.sleep(0.01)

    def barrier(self) -> None:
        """Wait for all ranks. Raises ConnectionError if a rank has ended, as a collective does."""
        if not self._leads:
            self._connections[0].send(b"x")
        for connection in self._connections:
            if not connection.recv(1):
                raise ConnectionError("Connection closed by peer")
        if self._leads:
            for connection in self._connections:
                connection.send(b"x")


def facts() -> dict[str, Any]:
    shown = "RANK|MASTER_|TORCHELASTIC_|WORLD_SIZE|SLURM_|CUDA_VISIBLE|OMP_|RUN_ROUND|^CONTAINER$"
    environment = {name: value for name, value in os.environ.items() if re.search(shown, name)}
    checks = json.loads(os.environ.get("RUN_ROUND", "{}")).get("check", True)
    return {
        "samples_ms": {"call": [1.0]},
        "facts": {
            "pid": os.getpid(),
            "hold_ms": float(os.getpid()),  # differs between processes
            **({"relative_error": 0.5} if checks else {}),
            "server": os.getppid(),
            "worker": _parent_of(os.getppid()),
            "at": [time.monotonic()],
            "worked": time.process_time(),
            "torch": "torch" in sys.modules,
            "executable": sys.executable,
            "folder": os.getcwd(),
            "environment": environment,
            "files": sorted(map(_target, os.listdir("/proc/self/fd"))),
            "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
            "ignored": [n for n in range(1, 32) if signal.getsignal(n) is signal.SIG_IGN],
        },
    }


def ok(params: Params) -> None:
    """Do nothing."""


def unsteady(params: Params) -> dict[str, Any]:
    """Take 1 ms, and twice as long in every second call. The file at `path` counts the calls."""
    with open(params.path, "a+") as file:
        file.write("x")
    calls = len(Path(params.path).read_text())
    return {"samples_ms": {"call": [1.0 + calls % 2]}}


def meet(params: Params) -> None:
    """Wait until two runs with tags 0 and 1 execute at the same time."""
    Path(f"{params.path}.{params.tag}").touch()
    while not all(Path(f"{params.path}.{tag}").exists() for tag in (0, 1)):
        time.sleep(0.01)


# ---- exceptions ----------------------------------------------------------------------------------


def raises(params: Params) -> None:
    raise ValueError("the message [/red] of the exception")


def raise_odd_message(params: Params) -> None:
    """Raise an exception whose message begins with a newline and looks like markup of rich."""
    raise ValueError("\n \nat file.yaml:100:8 [red]not[/red] [/] valid " + "x" * 100 + "\nsecond")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def raise_unprintable(params: Params) -> None:
    raise Unprintable


def raise_undecodable(params: Params) -> None:
    raise OSError(os.fsdecode(b"no such file: \xff"))


def raise_without_streams(params: Params) -> None:
    sys.stdout.close()
    sys.stderr.close()
    raise ValueError("said to nobody")


def sys_exit(params: Params) -> None:
    sys.exit(3)


def os_exit(params: Params) -> None:
    os._exit(params.tag)


def wrong(params: Params) -> None:
    raise WrongOutput("off by 0.5")


def unsupported(params: Params) -> None:
    raise Unsupported("needs a machine that is not built yet")


# ---- signals -------------------------------------------------------------------------------------


def sigkill(params: Params) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def segfault(params: Params) -> None:
    ctypes.string_at(0)


def abort(params: Params) -> None:
    import faulthandler

    faulthandler.disable()  # no stack trace, as if a thread of a library had aborted
    print("terminate called after throwing an instance of 'Oops'", file=sys.stderr)
    os.abort()


def kill_worker(params: Params) -> None:
    os.kill(_parent_of(os.getppid()), signal.SIGKILL)
    hang_in_python(params)


# ---- hangs ---------------------------------------------------------------------------------------


def hang_in_python(params: Params) -> None:
    while True:
        time.sleep(0.01)


def hang_in_a_lock(params: Params) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def hang_deaf(params: Params) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    hang_in_a_lock(params)


def hang_at_exit(params: Params) -> None:
    threading.Thread(target=hang_in_python, args=(params,)).start()


def hang_with_children(params: Params) -> None:
    leave_children(params)
    hang_in_python(params)


def wait(params: Params) -> None:
    """Write the pids of this process and a child to the FIFO and hang, unless PATH.go exists."""
    if Path(f"{params.path}.go").exists():
        return
    null = subprocess.DEVNULL
    child = subprocess.Popen(["sleep", "1000"], stdout=null, stderr=null, start_new_session=True)
    with open(params.path, "w") as file:
        file.write(f"{os.getpid()} {child.pid}\n")
    hang_in_python(params)


def pause(params: Params) -> None:
    """Write the pid of this process, twice, to the FIFO, and wait until PATH.go exists."""
    with open(params.path, "w") as file:
        file.write(f"{os.getpid()} {os.getpid()}\n")
    while not Path(f"{params.path}.go").exists():
        time.sleep(0.02)


def chat(params: Params) -> None:
    """Print each line of the FIFO, and raise at the line "fail"."""
    with open(params.path) as file:
        for line in file:
            print(f"said {line.strip()}", flush=True)
            if line == "fail\n":
                raise ValueError("told to fail")


# ---- memory --------------------------------------------------------------------------------------


def _limit_memory(more: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def memory_error(params: Params) -> None:
    from systems.measure.windows import during

    _limit_memory(2**28)
    held = []
    with during("backward"):
        while True:
            held.append(bytearray(2**20))


def torch_memory_error(params: Params) -> dict[str, Any]:
    import torch

    _limit_memory(2**28)
    return {"facts": {"sum": torch.ones(2**28).sum().item()}}


def fill_memory(params: Params) -> None:
    """Use up 4 GB slowly, and hang: Slurm checks the memory once per second."""
    held: list[bytes] = []
    while len(held) < 40:
        held.append(os.urandom(1) * 10**8)
        time.sleep(0.1)
    hang_in_python(params)


# ---- unusual facts and side effects --------------------------------------------------------------


def nan(params: Params) -> dict[str, Any]:
    return {"facts": {"loss": [1.0, float("nan")]}}


def deep(params: Params) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for _ in range(500):
        facts = {"inner": facts}
    return {"facts": facts}


def tensor(params: Params) -> dict[str, Any]:
    import torch

    return {"facts": {"loss": torch.zeros(1)}}


def many_facts(params: Params) -> dict[str, Any]:
    return {"samples_ms": {"call": [0.125] * 200_000}}


def undecodable_fact(params: Params) -> dict[str, Any]:
    return {"facts": {"path": os.fsdecode(b"\xff")}}


def undecodable_name(params: Params) -> dict[str, Any]:
    return {"facts": {os.fsdecode(b"\xff"): 1}}


def misspelt(params: Params) -> dict[str, Any]:
    return {"sample_ms": {"call": [1.0]}}


def fill_disk(params: Params) -> None:
    """Append to the file `path` until its disk is full. Do nothing if it does not exist."""
    if not Path(params.path).exists():
        return
    with open(params.path, "ab", buffering=0) as file:
        for size in (65536, 4096, 1):
            try:
                while file.write(b"x" * size) == size:
                    pass
            except OSError:
                continue


def print_to_full_disk(params: Params) -> None:
    """Like fill_disk, then print, which fails if the log is on this disk."""
    fill_disk(params)
    print("x" * 10**4)


def leave_children(params: Params) -> None:
    """Leave two child processes in sessions of their own: one after exec, one only forked."""
    pids = [subprocess.Popen(["sleep", "1000"], start_new_session=True).pid]
    readable, writable = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if (grandchild := os.fork()) == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            while True:
                time.sleep(1000)
        os.write(writable, str(grandchild).encode())
        os._exit(0)
    os.wait()
    pids.append(int(os.read(readable, 20)))
    if params.path:
        Path(params.path).write_text(" ".join(map(str, pids)))


def leave_no_floor(params: Params) -> None:
    """Remove the current folder, clear the environment, and close all files."""
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    shutil.rmtree(folder)
    os.environ.clear()
    os.closerange(0, 100)


def be_chatty(params: Params) -> None:
    for _ in range(20):
        print("x" * 10**6)
    os._exit(9)


def _target(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:  # the descriptor that listed the folder is closed by now
        return ""


def _parent_of(pid: int) -> int:
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat[stat.rindex(")") + 2 :].split()[1])
