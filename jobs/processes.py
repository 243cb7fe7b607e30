"""Handles that identify a process by its host, pid and start time, and names of signals.

The system reuses pids. The start time distinguishes a process from a later one with the same pid.
Containers may have the name of their host, but pids of their own.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self


@dataclass(frozen=True)
class ProcessHandle:
    """Identifies the process that runs the jobs of a submission without Slurm."""

    pid: int
    started: int | None  # start time in clock ticks since boot; None if unknown
    host: str
    interrupted: bool = False  # True if the process was asked to stop
    ended: bool = False  # True if the process has stopped running the jobs
    pids: str | None = None  # see `pid_space`; an earlier version wrote none

    @classmethod
    def of_this_process(cls, interrupted: bool = False, ended: bool = False) -> Self:
        pid = os.getpid()
        host = os.uname().nodename
        return cls(pid, start_ticks(pid), host, interrupted, ended, pid_space())

    @property
    def is_on_this_host(self) -> bool:
        """Whether the process is on this host, and not in a container with pids of its own."""
        return self.host == os.uname().nodename and self.pids in (None, pid_space())

    @property
    def is_running(self) -> bool:
        """Whether the process is alive. Valid only on the host of the process.

        If /proc hides the processes of other users (mount option hidepid), one with this pid is
        assumed to be this process.
        """
        if self.started is None:
            return False
        if Path(f"/proc/{self.pid}").exists():
            return start_ticks(self.pid) == self.started
        try:
            os.kill(self.pid, 0)
        except (OSError, OverflowError) as error:
            return isinstance(error, PermissionError)
        return False


@cache
def boot_id() -> str | None:
    """Return the id that the kernel of this host chose when it booted. None if it is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() or None
    except OSError:
        return None


@cache
def pid_space() -> str | None:
    """Return what identifies where pids of this process are valid: a boot and a PID namespace."""
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return None


def command_line() -> str:
    """Return the command of this process as text, with `python` as the interpreter.

    The console script `sweeps` becomes `-m jobs`, as in all commands that are printed.
    """
    words = sys.orig_argv[1:]
    if words and os.path.basename(words[0]) == "sweeps":
        words = ["-m", "jobs", *words[1:]]
    return shlex.join(["python", *words])


def without_options(command: str, *options: str) -> list[str]:
    """Return the words of a command without some options and their values."""
    kept: list[str] = []
    skip = False
    for word in shlex.split(command):
        option, equals, _ = word.partition("=")
        if not skip and option not in options:
            kept.append(word)
        skip = not skip and option in options and not equals
    return kept


def signal_name(number: int) -> str:
    """Return the name of a signal, for example SIGKILL. Real-time signals have no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def start_ticks(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot. None: it does not run."""
    fields = stat_fields(pid)
    return None if fields is None or fields[0] == "Z" else int(fields[19])


def stat_fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the name of the process. None: no such process.

    The name, which ends with the last parenthesis, may contain any bytes.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    return stat[stat.rindex(b")") + 2 :].decode().split()
