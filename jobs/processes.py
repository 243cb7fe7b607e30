"""Processes by pid and start time, so that a recycled pid is not taken for the first."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self


@dataclass(frozen=True)
class ProcessHandle:
    """A process on which jobs depend: the local queue's, or a debug run's."""

    pid: int
    started: int | None  # clock ticks since the host's boot
    host: str
    interrupted: bool = False  # it was asked to stop

    @classmethod
    def of_this_process(cls, interrupted: bool = False) -> Self:
        return cls(os.getpid(), start_ticks(os.getpid()), os.uname().nodename, interrupted)

    @property
    def is_on_this_host(self) -> bool:
        return self.host == os.uname().nodename

    @property
    def is_running(self) -> bool:
        """Whether the process lives. Only known on its own host."""
        return self.started is not None and start_ticks(self.pid) == self.started


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] == "Z" else int(fields[19])
