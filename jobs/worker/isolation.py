"""Isolation of runs: the worker starts each run in a new process, watches it, and kills it.

The processes are forked from a server that has already imported torch (`fork_server`). The server
never initializes CUDA, because forked processes could then not use CUDA.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from jobs.printing import say
from jobs.worker.fork_server import (
    EXIT_S,
    WORKER_SIGNALS,
    adopts_orphans,
    descendants,
    end_descendants,
    send_signal,
)

SLICE_S = 0.5  # maximum length of one wait, in seconds; signals are handled between waits
PAUSE_S = 5.0  # a short wait that takes this long was suspended, e.g. by `scontrol suspend`
START_S = 300.0  # timeout of the server's start, in seconds; imports may be slow
STACKS_S = 1.0  # time in which a hanging run must write its stacks, in seconds


@contextmanager
def blocked_signals() -> Iterator[None]:
    """Block the signals that a worker handles, for example SIGTERM, during the `with` block."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, WORKER_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ServerDied(RuntimeError):
    """Raised if the fork server does not start: an import ended it, or took too long."""


class Deadline:
    """The end of a wait. Time in which the job was suspended does not count."""

    def __init__(self, seconds: float):
        self._looked = time.monotonic()
        self._at = self._looked + seconds

    def left(self) -> float:
        """Return the time that is left, in seconds. Call it often: a long pause is a suspension."""
        now = time.monotonic()
        if now - self._looked > PAUSE_S:
            self._at += now - self._looked
        self._looked = now
        return self._at - now

    def shorten(self, seconds: float) -> None:
        """Leave at most this time."""
        self._at = min(self._at, time.monotonic() + seconds)


def wait_for(waiting: list[Any], seconds: float) -> list[Any]:
    """Return which of several objects are ready, after a timeout none.

    Unlike `multiprocessing.connection.wait`, it splits the wait into short waits. Python runs
    signal handlers only in the main thread. If the kernel delivers a signal to another thread, e.g.
    of numpy, the main thread continues to wait. This happens under Slurm, which sends SIGCONT with
    other signals.
    """
    deadline = Deadline(seconds)
    while True:
        ready = wait(waiting, max(0.0, min(deadline.left(), SLICE_S)))
        if ready or deadline.left() <= 0:
            return list(ready)


class ForkServer:
    """Starts and controls a fork server, which executes one run at a time, see `fork_server.serve`.

    Raises ServerDied if an import ends the server, or if the imports take longer than START_S.
    """

    def __init__(
        self,
        environment: dict[str, str],
        cwd: str | None = None,
        modules: Iterable[str] = (),
        benchmarks: Iterable[str] = (),
    ):
        ours, theirs = socket.socketpair()
        with theirs, blocked_signals():  # the server inherits the signal mask and keeps it
            code = "import sys; from jobs.worker.fork_server import serve; "
            code += "serve(int(sys.argv[1]), sys.argv[2].split(), sys.argv[3].split())"
            names = [" ".join(modules), " ".join(benchmarks)]
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", code, str(theirs.fileno()), *names],
                env=environment,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.pid = self._process.pid
        self.connection = Connection(ours.detach())
        if not wait_for([self.connection], START_S) or self.receive() != ("ready",):
            self.kill()
            raise ServerDied(
                f"the fork server was not ready within {START_S:.0f} s, or an import ended it "
                f"(exit code {self._process.returncode})"
            )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def start(
        self, function: Callable[..., None], *arguments: Any, scratch: str | None = None
    ) -> Child:
        """Fork a process that calls a function. The server removes `scratch` at its end."""
        self.send(("start", function, arguments, scratch))
        return Child(self)

    def send(self, order: Any) -> None:
        # A signal handler may also send a message. If the server has ended, `receive` reports that.
        with blocked_signals(), suppress(OSError):
            self.connection.send(order)

    def receive(self) -> Any:
        """Return the next message from the fork server, or None if the server has ended."""
        with blocked_signals():
            try:
                return self.connection.recv()
            except (EOFError, OSError):
                return None

    def close(self) -> None:
        self.connection.close()  # the server ends when the connection closes
        try:
            self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill the server and its descendants.

        If the server had died, a worker that adopts orphans has adopted them. It therefore kills
        all its own descendants, also other servers. They are started again when they are needed.
        """
        for pid in (self.pid, *descendants(self.pid)):
            send_signal(pid, signal.SIGKILL)
        self._process.wait()
        self.connection.close()
        if adopts_orphans():
            end_descendants()


class Child:
    """Handle of the process of a run. When `ended` is True, its descendants have exited, too."""

    def __init__(self, server: ForkServer):
        self._server = server
        self.ended = False
        # Negative: number of a signal. None, although the run has ended: the fork server ended.
        self.exit_code: int | None = None

    def fileno(self) -> int:
        """For `multiprocessing.connection.wait`, which tells when the server has sent a message."""
        return self._server.connection.fileno()

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for the run to end. Return whether it has ended."""
        if not self.ended and wait_for([self._server.connection], seconds):
            with blocked_signals():
                self._take(self._server.receive())
        return self.ended

    def _take(self, answer: Any) -> None:
        self.ended = True
        if answer is None:
            self._server.kill()
            return
        _, self.exit_code, left = answer
        if left:
            alive = f"processes {left} of a run are still alive {EXIT_S:.0f} s after SIGKILL"
            say(f"{alive} and may still hold GPU memory", sys.stderr)

    def kill(self) -> None:
        if not self.ended:
            self._server.send(("kill",))
            if not self.wait(EXIT_S + 5):
                self.ended = True
                self._server.kill()

    def stacks(self) -> None:
        """Make every process of the run write the stacks of its threads, see `watch_stacks`."""
        self._server.send(("stacks",))
        time.sleep(STACKS_S)


def oom_kills() -> int:
    """Return how often the OOM killer was active in this memory cgroup. 0 if it is unknown."""
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
        # In a container, the path may be that of the host, but the mounted root is this cgroup.
        for folder in (root / path.lstrip("/"), root):
            try:
                entries = dict(e.split() for e in (folder / name).read_text().splitlines())
                return int(entries["oom_kill"])
            except (OSError, ValueError, KeyError):
                continue
    return 0
