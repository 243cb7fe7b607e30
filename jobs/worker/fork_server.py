"""Fork server: a process that imports torch and other modules once, then forks each run.

Forking a run takes milliseconds. Importing torch in each run would take seconds.

The worker starts the server (`isolation.ForkServer`) and sends it one run at a time over a socket.
The server reports how each run ended. Orphaned descendants become children of the server
(PR_SET_CHILD_SUBREAPER). The server can therefore kill all processes that a run leaves behind, even
in other sessions, and wait until they have exited. It does this after each run, and when the worker
exits.

The fork server of `multiprocessing` is not suitable. It does not exit before its children, imports
the worker's `__main__` module in each child, and does not adopt orphans.
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

EXIT_S = 10.0  # maximum wait until killed processes have exited, in seconds
DUMP_STACKS = signal.SIGUSR1  # makes the processes of a run write the stacks of their threads
# Slurm sends these signals to all processes of a job step, but only the worker must handle them.
WORKER_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PRELOAD = ("torch",)  # modules to import for a benchmark that does not define PRELOAD
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def serve(handle: int, modules: list[str], benchmarks: list[str]) -> None:
    """Run the fork server. This is the main function of the server's process.

    The server receives these messages:

    - ("start", function, arguments, scratch folder): fork a run that calls the function.
    - ("stacks",): make the processes of the run write the stacks of their threads.
    - ("kill",): kill the run.

    The server sends ("ready",) when its imports are done. At the end of each run it sends ("ended",
    exit code or None if unknown, pids of processes that are still alive).

    The process must be started with WORKER_SIGNALS blocked.

    Args:
        handle: file descriptor of the socket to the worker.
        modules: names of modules to import before the first run.
        benchmarks: names of benchmark modules to import after `modules`. The modules in the PRELOAD
            of each benchmark are imported, too.
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
    os._exit(code)  # skip torch's exit handlers, which are slow


def _import(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except BaseException:  # a run that needs the module fails in the same way
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
            self.scratch = None  # the worker reads and removes the folder
            self._connection.send(("ended", code, left))

    def _watch(self, child: int, statuses: dict[int, int]) -> None:
        """Wait until the run's process has ended or the worker sends ("kill",)."""
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

        The process runs in a separate session and is killed when this server ends.
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
            os._exit(code)  # skip exit handlers and threads that are still running
        return 0


def flush() -> None:
    """Flush stdout and stderr, unless the benchmark has closed them."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            continue


def adopt_orphans() -> None:
    """Make this process, instead of init, the parent of descendants whose parent has exited."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent exits.

    Args:
        parent: pid of the process that started this one.
        number: number of the signal.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # the parent had exited before prctl was called
        os.kill(os.getpid(), number)


def end_descendants(statuses: dict[int, int] | None = None) -> list[int]:
    """Kill all descendants of this process, and wait until they have exited.

    Args:
        statuses: dict to which the wait status of each exited child is added, with the pid as key.

    Returns:
        Pids of descendants that are still alive after EXIT_S seconds, e.g. because a driver blocks
        them.
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
    """Add the wait statuses of exited children to `statuses`. Returns whether a child is left."""
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
    """Send DUMP_STACKS to the processes that handle it. Other processes would be killed by it."""
    for pid in descendants(os.getpid()):
        try:
            with open(f"/proc/{pid}/status") as file:
                caught = next(line for line in file if line.startswith("SigCgt:"))
        except (OSError, StopIteration):
            continue
        if int(caught.split()[1], 16) >> (DUMP_STACKS - 1) & 1:
            send_signal(pid, DUMP_STACKS)


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process. Do nothing if it has exited or this is not permitted."""
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass
