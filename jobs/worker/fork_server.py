"""Fork server: a process that imports torch (or what else the runs need) once and forks the runs.

Forking a run takes milliseconds. Importing torch in each run would take seconds.

The worker starts the server (`isolation.ForkServer`) and sends it one run at a time over a socket.
The server reports how each run ended. It adopts orphaned descendants, so after a run it can kill
every process that the run left behind, whatever its session, and wait until all have exited. When
the worker exits, the server does the same and exits too.

The fork server of `multiprocessing` is not suitable: it lives as long as any of its children,
imports the worker's `__main__` in each child, and does not adopt orphans.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

EXIT_S = 10.0  # wait for killed processes to exit, in seconds; one stuck in a driver may need more
DUMP_STACKS = signal.SIGUSR1
# Slurm sends signals to every process of a step that it finds. Only the worker must handle these.
WORKER_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PRELOAD = ("torch",)  # default for a benchmark module without PRELOAD
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def serve(handle: int, modules: list[str], benchmarks: list[str]) -> None:
    """Run the fork server: the main function of its process.

    It receives the orders ("start", function, arguments, scratch folder), ("stacks",) and
    ("kill",). It answers ("ready",) once, and ("ended", exit code or None, pids of processes that
    are still alive) for each start. The process must be started with WORKER_SIGNALS blocked.

    Args:
        handle: file descriptor of the socket to the worker.
        modules: modules to import before the first run.
        benchmarks: benchmark modules to import after those, each with the modules in its PRELOAD.
    """
    connection = Connection(handle)
    adopt_orphans()
    for name in modules:
        _import(name)
    for name in benchmarks:
        module = _import(name)
        try:
            late_modules = tuple(getattr(module, "PRELOAD", PRELOAD))
        except TypeError:  # PRELOAD is not a sequence of names
            traceback.print_exc()
            late_modules = PRELOAD
        for late in late_modules:
            _import(late)
    code = 0
    server = _Server(connection)
    try:
        connection.send(("ready",))
        server.loop()
    except (EOFError, ConnectionError):  # the worker has exited
        pass
    except BaseException:  # e.g. fork failed; the worker detects that the server ends
        traceback.print_exc()
        code = 1
    end_descendants()
    if server.scratch is not None:  # a worker that was killed could not remove it
        shutil.rmtree(server.scratch, ignore_errors=True)
    flush()
    os._exit(code)  # torch's exit handlers take longer than the start of a run


def _import(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except BaseException:  # the run that needs the module fails on it too, and records the error
        traceback.print_exc()
        return None


class _Server:
    def __init__(self, connection: Connection):
        self.scratch: str | None = None  # scratch folder of the current run
        self._connection = connection
        self._wakes, self._wake = os.pipe()
        os.set_blocking(self._wakes, False)
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # the wakeup fd needs a handler

    def loop(self) -> None:
        while True:
            order = self._connection.recv()
            if order[0] != "start":
                continue  # the order arrived after its run had ended
            _, function, arguments, self.scratch = order
            child = self._fork(function, arguments)
            statuses: dict[int, int] = {}
            self._watch(child, statuses)
            left = end_descendants(statuses)
            status = statuses.get(child)
            code = None if status is None else os.waitstatus_to_exitcode(status)
            self.scratch = None  # the worker reads and removes it
            self._connection.send(("ended", code, left))

    def _watch(self, child: int, statuses: dict[int, int]) -> None:
        """Wait until the run's process has ended or the worker orders to kill it."""
        while child not in statuses:
            ready = wait([self._connection, self._wakes])
            if self._wakes in ready:
                os.read(self._wakes, 4096)
                _reap(statuses)
            if self._connection in ready:
                order = self._connection.recv()
                if order[0] == "kill":
                    return
                if order[0] == "stacks":
                    _ask_for_stacks()

    def _fork(self, function: Callable[..., None], arguments: tuple[Any, ...]) -> int:
        """Call `function(*arguments)` in a forked process and return the pid of that process.

        The process has a separate session and is killed when this server ends.
        """
        server = os.getpid()
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (*WORKER_SIGNALS, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # Slurm's warning, meant for the worker
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            self._connection.close()
            os.close(self._wakes)
            os.close(self._wake)
            os.setsid()
            die_with_parent(server)
            function(*arguments)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            flush()
            os._exit(code)  # skip remaining threads and exit handlers: the run is over
        return 0


def flush() -> None:
    """Flush stdout and stderr, unless the benchmark has closed them."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            continue


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process instead of init's."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent exits.

    Args:
        parent: pid of the process that started this one.
        number: the signal.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # the parent exited before the call
        os.kill(os.getpid(), number)


def end_descendants(statuses: dict[int, int] | None = None) -> list[int]:
    """Kill all descendants of this process, repeatedly until none is left.

    Args:
        statuses: receives the wait status of each child that is reaped here, by pid.

    Returns:
        Pids of processes that have not exited within EXIT_S.
    """
    statuses = {} if statuses is None else statuses
    deadline = time.monotonic() + EXIT_S
    pause = 0.001
    while _reap(statuses):
        left = descendants(os.getpid())
        if time.monotonic() > deadline:
            return left
        for pid in left:
            send_signal(pid, signal.SIGKILL)
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return []


def _reap(statuses: dict[int, int]) -> bool:
    """Collect the wait statuses of exited children. Returns whether other children remain."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        statuses[pid] = status


def descendants(root: int) -> list[int]:
    """Return the pids of all descendants of a process: its children, their children, and so on."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    stat = file.read()
            except OSError:  # the process has exited in the meantime
                continue
            parent = int(stat[stat.rindex(b")") + 2 :].split()[1])
            children.setdefault(parent, []).append(int(name))
    found: list[int] = []
    generation = children.get(root, [])
    while generation:
        found += generation
        generation = [pid for parent in generation for pid in children.get(parent, [])]
    return found


def _ask_for_stacks() -> None:
    """Send DUMP_STACKS to the run's processes that handle it. It would terminate the others."""
    for pid in descendants(os.getpid()):
        try:
            with open(f"/proc/{pid}/status") as file:
                caught = next(line for line in file if line.startswith("SigCgt:"))
        except (OSError, StopIteration):
            continue
        if int(caught.split()[1], 16) >> (DUMP_STACKS - 1) & 1:
            send_signal(pid, DUMP_STACKS)


def send_signal(pid: int, number: int) -> None:
    """Send a signal. Do nothing if the process has exited or may not be signalled."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass
