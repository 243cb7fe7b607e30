"""Each run in a fresh process of its own: started, watched and ended from the worker.

The processes are forked from a warm server (`fork_server`). The server never touches CUDA, so a
run may; a fork costs milliseconds where an interpreter and torch's import cost seconds.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from jobs.worker.environment import with_project
from jobs.worker.fork_server import EXIT_S, WORKER_SIGNALS, descendants, send_signal

SLICE_S = 0.5  # at most, until a signal that came meanwhile is handled
START_S = 300.0  # for the server to import torch from a slow file system
STACKS_S = 1.0  # for a hanging run to write where it hangs
STACKS_BYTES = 16000  # of all processes of a run together


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Hold back the signals that stop a worker, for the length of what must not be cut in two."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WORKER_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ServerDied(RuntimeError):
    """The fork server ended before it could start a run."""


def wait_for(waiting: list[Any], seconds: float) -> list[Any]:
    """`multiprocessing.connection.wait`, in slices: the kernel may hand a signal to another thread
    (numpy's, say; Slurm sends SIGCONT along, so this one looks busy), and Python runs its handler
    only when this thread comes back."""
    deadline = time.monotonic() + seconds
    while True:
        left = deadline - time.monotonic()
        ready = wait(waiting, max(0.0, min(left, SLICE_S)))
        if ready or left <= SLICE_S:
            return list(ready)


class ForkServer:
    """Starts processes, one at a time, that begin with modules already imported.

    Args:
        modules: what to import.
        benchmarks: modules to import after those, each with what its own PRELOAD names.

    Raises:
        ServerDied: importing those modules ended the server, or took longer than START_S.
    """

    def __init__(self, modules: Iterable[str] = (), benchmarks: Iterable[str] = ()):
        ours, theirs = socket.socketpair()
        with theirs, blocked_signals():  # the server keeps the mask for its life
            code = "import sys; from jobs.worker.fork_server import serve; "
            code += "serve(int(sys.argv[1]), sys.argv[2].split(), sys.argv[3].split())"
            names = [" ".join(modules), " ".join(benchmarks)]
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", code, str(theirs.fileno()), *names],
                env=with_project(dict(os.environ)),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.pid = self._process.pid
        self.connection = Connection(ours.detach())
        self.alive = bool(wait_for([self.connection], START_S)) and self.receive() == ("ready",)
        if not self.alive:
            self.kill()
            raise ServerDied(f"the fork server ended with {self._process.returncode}")

    def start(
        self, function: Callable[..., None], *arguments: Any, scratch: str | None = None
    ) -> Child:
        """Run `function(*arguments)` in a new process; `function` goes by its name.

        Args:
            scratch: folder to remove should this process be killed meanwhile.
        """
        self.send(("start", function, arguments, scratch))
        return Child(self)

    def send(self, order: Any) -> None:
        with blocked_signals():  # a handler that gives an order too must not cut this one in two
            try:
                self.connection.send(order)
            except OSError:  # its end shows when the answer is waited for
                pass

    def receive(self) -> Any:
        """The next answer; None if the server has ended."""
        with blocked_signals():
            try:
                return self.connection.recv()
            except (EOFError, OSError):
                self.alive = False
                return None

    def close(self) -> None:
        """End the server and all that it started."""
        self.connection.close()  # it takes that for its worker's end
        try:
            self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self.alive = False
        for pid in (self.pid, *descendants(self.pid)):
            send_signal(pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()


class Child:
    """A run's process, seen from the worker. Ended means: it, and all that it started."""

    def __init__(self, server: ForkServer):
        self._server = server
        self.ended = False
        self.exit_code: int | None = None  # as subprocess has it; None where nobody can tell
        self.lost = False  # the server ended first

    def fileno(self) -> int:
        """To be waited for by `multiprocessing.connection.wait`; then call `wait(0)`."""
        return self._server.connection.fileno()

    def wait(self, seconds: float) -> bool:
        """Wait for its end. Returns whether it has ended."""
        if not self.ended and wait_for([self._server.connection], seconds):
            with blocked_signals():
                self._take(self._server.receive())
        return self.ended

    def _take(self, answer: Any) -> None:
        self.ended = True
        if answer is None:
            self.lost = True
            self._server.kill()
            return
        _, self.exit_code, left = answer
        if left:
            print(f"processes {left} cannot be killed", file=sys.stderr, flush=True)

    def kill(self) -> None:
        """End it, and all that it started."""
        if not self.ended:
            self._server.send(("kill",))
            if not self.wait(EXIT_S + 5):
                self.ended = True
                self._server.kill()

    def stacks(self, scratch: Path) -> str:
        """Have every process of the run write its threads' stacks, and return them."""
        before = _sizes(scratch)
        self._server.send(("stacks",))
        deadline = time.monotonic() + STACKS_S
        last = before
        while time.monotonic() < deadline:
            time.sleep(0.05)
            now = _sizes(scratch)
            if now == last and all(now.get(path, 0) > size for path, size in before.items()):
                break  # all have begun to write, and all are done
            last = now
        return read_stacks(scratch)


def _sizes(scratch: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in scratch.glob("stack*.txt")}


def read_stacks(scratch: Path) -> str:
    """The stacks that a run's processes wrote, of a hang or of a crash."""
    texts = {
        path.stem.removeprefix("stack"): path.read_text(errors="replace").strip()
        for path in sorted(scratch.glob("stack*.txt"), key=lambda path: (len(path.name), path.name))
    }
    texts = {name: text for name, text in texts.items() if text}
    ranks = {name: text for name, text in texts.items() if name.isdigit()}
    if len(ranks) < 2 and set(texts) == set(ranks):
        return "".join(ranks.values())[-STACKS_BYTES:]
    share = STACKS_BYTES // max(1, len(ranks))
    # The agent is waiting for its ranks: that tells something only where there are none.
    return (
        "\n\n".join(f"[rank {name}] {text[-share:]}" for name, text in ranks.items())
        or ("".join(texts.values())[-STACKS_BYTES:])
    )


def oom_kills() -> int:
    """How often the kernel has killed a process of this one's memory cgroup for want of memory."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):  # cgroup v1
            root, name = Path("/sys/fs/cgroup/memory"), "memory.oom_control"
        elif controllers == "":  # v2
            root, name = Path("/sys/fs/cgroup"), "memory.events"
        else:
            continue
        # In a container the path may be the host's, and the mount begins at this cgroup.
        for folder in (root / path.lstrip("/"), root):
            try:
                entries = dict(e.split() for e in (folder / name).read_text().splitlines())
                return int(entries["oom_kill"])
            except (OSError, ValueError, KeyError):
                continue
    return 0
