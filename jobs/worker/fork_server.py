"""The process that runs are forked from. It has imported torch, or whatever else they need, once; a
fork then costs milliseconds.

A worker starts it (`isolation.ForkServer`), tells it over a socket what to run, one run at a time,
and hears how each ended. It adopts the orphans of what it forked, so when a run has ended it
can end all that the run left behind, whatever its session, and wait until nothing is left. When
its worker is gone it does the same and goes too. (multiprocessing's server lives as long as any of
its children, has each import the worker's `__main__` again, and looks after no orphans.)
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

EXIT_S = 10.0  # for killed processes to go; one that is stuck in a driver may take longer
DUMP_STACKS = signal.SIGUSR1
# Slurm signals every process of a step it can find: these must reach the worker alone.
WORKER_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PRELOAD = ("torch",)  # of a benchmark that does not say what its runs need
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def serve(handle: int, modules: list[str], benchmarks: list[str]) -> None:
    """The server's main function.

    Orders:  ("start", function, arguments, scratch folder), ("stacks",), ("kill",)
    Answers: ("ready",) once, then for each start ("ended", exit code or None, pids still there)

    Args:
        handle: file descriptor of the worker's socket. WORKER_SIGNALS are blocked.
        modules: what to import before the first run.
        benchmarks: modules to import after those, each with what its own PRELOAD names.
    """
    connection = Connection(handle)
    adopt_orphans()
    for name in modules:
        _import(name)
    for name in benchmarks:
        module = _import(name)
        try:
            late_modules = tuple(getattr(module, "PRELOAD", PRELOAD))
        except TypeError:  # no list of names
            traceback.print_exc()
            late_modules = PRELOAD
        for late in late_modules:
            _import(late)
    code = 0
    server = _Server(connection)
    try:
        connection.send(("ready",))
        server.loop()
    except (EOFError, ConnectionError):  # the worker is gone
        pass
    except BaseException:  # no process can be had, say; the worker sees this one end
        traceback.print_exc()
        code = 1
    end_descendants()
    if server.scratch is not None:  # a worker that was killed could not
        shutil.rmtree(server.scratch, ignore_errors=True)
    flush()
    os._exit(code)  # what torch does at exit takes longer than a run's start


def _import(name: str) -> ModuleType | None:
    try:
        return importlib.import_module(name)
    except BaseException:  # the run that needs it will meet this too, and record it
        traceback.print_exc()
        return None


class _Server:
    def __init__(self, connection: Connection):
        self.scratch: str | None = None  # of what is running
        self._connection = connection
        self._wakes, self._wake = os.pipe()
        os.set_blocking(self._wakes, False)
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler there is no wake-up

    def loop(self) -> None:
        while True:
            order = self._connection.recv()
            if order[0] != "start":
                continue  # it crossed the end of its run
            _, function, arguments, self.scratch = order
            child = self._fork(function, arguments)
            statuses: dict[int, int] = {}
            self._watch(child, statuses)
            left = end_descendants(statuses)
            status = statuses.get(child)
            code = None if status is None else os.waitstatus_to_exitcode(status)
            self.scratch = None  # the worker will read it first
            self._connection.send(("ended", code, left))

    def _watch(self, child: int, statuses: dict[int, int]) -> None:
        """Until the run's process has ended, or is to be ended."""
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
        """Start `function(*arguments)` in a process and session of its own, dying with this one."""
        server = os.getpid()
        child = os.fork()
        if child:
            return child
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (*WORKER_SIGNALS, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # Slurm's warning is for the worker
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
            os._exit(code)  # whatever threads and exit handlers are left: the run is over
        return 0


def flush() -> None:
    """Write out what was printed, unless the benchmark has closed its own output."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            continue


def adopt_orphans() -> None:
    """Have processes whose parents end become this one's children, not init's."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when `parent`, which started it, ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), number)


def end_descendants(statuses: dict[int, int] | None = None) -> list[int]:
    """Kill everything that this process started or adopted, again until nothing is left.

    Args:
        statuses: gets the status of each child that ends here.

    Returns:
        Processes that would not go within EXIT_S.
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
    """Note the statuses of children that have ended. Returns whether there are others."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        statuses[pid] = status


def descendants(root: int) -> list[int]:
    """Children of a process, theirs, and so on."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    stat = file.read()
            except OSError:  # ended meanwhile
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
    """Ask those processes of the run that know the signal; the others it would end."""
    for pid in descendants(os.getpid()):
        try:
            with open(f"/proc/{pid}/status") as file:
                caught = next(line for line in file if line.startswith("SigCgt:"))
        except (OSError, StopIteration):
            continue
        if int(caught.split()[1], 16) >> (DUMP_STACKS - 1) & 1:
            send_signal(pid, DUMP_STACKS)


def send_signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except (ProcessLookupError, PermissionError):
        pass
