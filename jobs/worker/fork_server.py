"""Fork server: a process that imports torch and other modules once, then forks each run.

Forking a run takes milliseconds. Importing torch in each run would take seconds. The worker starts
the server (`isolation.ForkServer`) and sends it one run at a time over a socket. The server reports
how each run ended.

After each run, and when the worker exits, the server kills all processes that the run has left
behind, even those in other sessions: orphaned descendants become children of the server
(PR_SET_CHILD_SUBREAPER).

The fork server of `multiprocessing` does not exit before its children, imports the worker's
`__main__` module in each child, and does not adopt orphans.
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
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from types import ModuleType
from typing import Any

from jobs.processes import stat_fields

EXIT_S = 10.0  # maximum wait until killed processes have exited, in seconds
DUMP_STACKS = signal.SIGUSR1  # makes the processes of a run write the stacks of their threads
# Slurm sends these signals to all processes of a job step, but only the worker must handle them.
WORKER_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PRELOAD = ("torch",)  # modules to import for a benchmark that does not define PRELOAD
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


def serve(handle: int, modules: list[str], benchmarks: list[str]) -> None:
    """Run the fork server. This is the main function of the server's process.

    The worker sends these messages over the socket with the file descriptor `handle`:

    - ("start", function, arguments, scratch folder): fork a process that calls the function.
    - ("stacks",): make the processes of the current run write the stacks of their threads.
    - ("kill",): kill the current run.

    The server sends these messages to the worker:

    - ("ready",): all imports are done: `modules`, `benchmarks`, and what these list in PRELOAD.
    - ("ended", exit code, pids): the run has ended. The exit code is None if it is unknown. The
      pids are those of processes that are still alive after SIGKILL.

    WORKER_SIGNALS must be blocked when this process starts.
    """
    connection = Connection(handle)
    adopt_orphans()
    for name in modules:
        _import(name)
    for name in benchmarks:
        late = getattr(_import(name), "PRELOAD", PRELOAD)
        for module in late if isinstance(late, (list, tuple)) else PRELOAD:
            _import(module)
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
    if server.scratch is not None:  # the worker may be killed before it removes the folder
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
        self.scratch: str | None = None  # scratch folder of the latest run
        self._connection = connection
        self._wakes, self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
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
            self._connection.send(("ended", code, left))

    def _watch(self, child: int, statuses: dict[int, int]) -> None:
        """Wait until the process of a run has ended, or until the worker sends ("kill",)."""
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
        """Fork a process that calls `function(*arguments)` in a session of its own."""
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
    """Flush stdout and stderr, as far as that is possible."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()


def _prctl(option: int, value: Any) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def adopt_orphans() -> None:
    """Make this process, instead of init, the parent of descendants whose parent has exited."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def adopts_orphans() -> bool:
    answer = ctypes.c_int(0)
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(answer))
    return bool(answer.value)


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent exits."""
    _prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:  # the parent had exited before prctl was called
        os.kill(os.getpid(), number)


def end_descendants(statuses: dict[int, int] | None = None) -> list[int]:
    """Kill all descendants of this process, and wait until they have exited.

    The status of each exited child is added to `statuses`, as `os.waitpid` returns it. Returns the
    pids of descendants that have not exited within EXIT_S, for example because of a driver.
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
    """Add the statuses of the children that have exited. Return whether others have not."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        statuses[pid] = status


def descendants(root: int) -> list[int]:
    """Return the pids of the children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        fields = stat_fields(int(name)) if name.isdigit() else None
        if fields is not None:
            children.setdefault(int(fields[1]), []).append(int(name))
    found: list[int] = []
    generation = children.get(root, [])
    while generation:
        found += generation
        generation = [pid for parent in generation for pid in children.get(parent, [])]
    return found


def _ask_for_stacks() -> None:
    """Send DUMP_STACKS to all processes of the current run that handle it. It kills others."""
    for pid in descendants(os.getpid()):
        try:
            with open(f"/proc/{pid}/status", "rb") as file:
                caught = next(line for line in file if line.startswith(b"SigCgt:"))
        except (OSError, StopIteration):
            continue
        if int(caught.split()[1], 16) >> (DUMP_STACKS - 1) & 1:
            send_signal(pid, DUMP_STACKS)


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process, if it exists and this user may do so."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
