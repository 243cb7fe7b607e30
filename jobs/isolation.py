"""Each run in a fresh process: forked from a server that has imported torch, watched, and ended.

The server (multiprocessing's) never touches CUDA, so a child may; a fork costs milliseconds where
an interpreter and torch's import cost seconds.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

from jobs.run_process import DUMP_STACKS, TOKEN_VARIABLE

STACKS_S = 1.0  # for a hanging run to write where it hangs
EXIT_S = 10.0  # for a run to leave after it wrote its outcome
# What a surrounding allocation or torchrun leaves in the environment; a job must not see it.
_LEAKS = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|GROUP_WORLD_SIZE|ROLE_RANK|ROLE_NAME"
    r"|ROLE_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|TORCHELASTIC_.*|PMI_.*|PMIX_.*|OMPI_.*"
    r"|SUBMITIT_.*)$"
)
_SLURM_LEAKS = re.compile(r"(?!SLURM_CONF$)(SLURM|SBATCH|SRUN|SALLOC|SLURMD)_.*$")


def without_leaks(environment: dict[str, str], slurm: bool = True) -> dict[str, str]:
    """The environment without what a surrounding torchrun, or (slurm) allocation, put there."""
    return {
        name: value
        for name, value in environment.items()
        if not _LEAKS.match(name) and not (slurm and _SLURM_LEAKS.match(name))
    }


def job_environment() -> dict[str, str]:
    """The environment that a job starts from: this one without leaks, this project importable."""
    environment = without_leaks(dict(os.environ))
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, *filter(None, [environment.get("PYTHONPATH")])]
    return environment | {"PYTHONPATH": os.pathsep.join(paths)}


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Hold back the signals that stop a worker, for the length of what must not be cut in two."""
    held = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR2}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ForkServer:
    """Starts processes that begin with `preload` already imported."""

    def __init__(self, preload: list[str]):
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(preload)

    def start(self, target: Callable[..., None], *arguments: Any) -> Child:
        """Run `target(*arguments)` in a new process."""
        # The server keeps the blocked mask for its life: Slurm's signals reach it too, and must
        # not end it. Children unblock (become_child).
        with blocked_signals():
            ensure_running()
            process = self._context.Process(target=target, args=arguments)
            process.start()
        return Child(process)

    def pipe(self) -> tuple[Any, Any]:
        return self._context.Pipe(duplex=False)


class Child:
    """A process of the fork server's, by its handle in this one."""

    def __init__(self, process: Any):
        self.process = process
        self.pid: int = process.pid

    @property
    def sentinel(self) -> int:
        return int(self.process.sentinel)

    def wait(self, seconds: float) -> bool:
        """Wait for its end. Returns whether it has ended."""
        multiprocessing.connection.wait([self.process.sentinel], max(seconds, 0))
        return self.ended

    @property
    def ended(self) -> bool:
        return self.process.exitcode is not None

    @property
    def exit_code(self) -> int | None:
        """As subprocess has it: negative is the signal that ended it."""
        return self.process.exitcode  # type: ignore[no-any-return]

    def kill(self, token: str) -> None:
        """End it, its session, and everything that carries its run's token."""
        if not self.ended:
            _kill_group(self.pid)
        self.wait(EXIT_S)
        _kill_group(self.pid)  # what it forked and left behind stays in its session
        kill_token(token)


def _kill_group(pid: int) -> None:
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


def token_pids(token: str) -> list[int]:
    """Processes started with this run's token in their environment, in whatever session."""
    needle = f"{TOKEN_VARIABLE}={token}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if needle in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # ended meanwhile, or another user's
                continue
    return found


def kill_token(token: str) -> None:
    """Kill every process of a run until none is left: one may fork while it is being killed."""
    deadline = time.monotonic() + EXIT_S
    while (pids := token_pids(token)) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.02)


def ask_for_stacks(child: Child, token: str, scratch: Path) -> str:
    """Have every process of a run write its threads' stacks, and return them."""
    files = {path: path.stat().st_size for path in scratch.glob("stack*.txt")}
    for pid in {child.pid, *token_pids(token)} if files else ():
        # The signal ends a process that does not expect it; that one is about to be killed.
        try:
            os.kill(pid, DUMP_STACKS)
        except ProcessLookupError:
            pass
    deadline = time.monotonic() + STACKS_S
    while time.monotonic() < deadline and any(
        p.stat().st_size == size for p, size in files.items()
    ):
        time.sleep(0.05)
    return read_stacks(scratch)


def read_stacks(scratch: Path) -> str:
    """The stacks that a run's processes wrote, of a hang or of a crash."""
    parts = []
    for path in sorted(scratch.glob("stack*.txt")):
        text = path.read_text(errors="replace").strip()
        if text:
            parts.append(f"[{path.stem.removeprefix('stack')}] {text}")
    return "\n\n".join(parts)[-16000:]


def oom_kills() -> int:
    """How often the kernel has killed a process of this one's memory cgroup for want of memory."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":  # cgroup v1
            counter = Path("/sys/fs/cgroup/memory") / path.lstrip("/") / "memory.oom_control"
        elif controllers == "":  # v2
            counter = Path("/sys/fs/cgroup") / path.lstrip("/") / "memory.events"
        else:
            continue
        try:
            for entry in counter.read_text().splitlines():
                name, _, count = entry.partition(" ")
                if name == "oom_kill":
                    return int(count)
        except OSError:
            continue
    return 0
