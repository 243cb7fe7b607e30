"""Processes by pid and start time, so that a recycled pid is not taken for the first."""

from __future__ import annotations

import os
from pathlib import Path


def process_handle(pid: int) -> dict[str, object]:
    """A process by pid and start time, so that a recycled pid is not taken for it."""
    return {"pid": pid, "started": start_ticks(pid), "host": os.uname().nodename}


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] == "Z" else int(fields[19])
