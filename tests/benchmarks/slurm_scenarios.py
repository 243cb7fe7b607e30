"""A benchmark that does on demand what real ones do by accident."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any, Literal

from systems.benchmark import BenchmarkParams

VERSION = 1
PRELOAD = ()
LONGEST_S = 240.0
MOST_EATEN = 40  # times 100 MB
SHOWN = ("RANK", "MASTER_PORT", "SLURM_CPU_BIND", "CUDA_VISIBLE_DEVICES", "SLURM_CPUS_PER_TASK")


class Params(BenchmarkParams):
    """One run; `index` only tells runs apart."""

    index: int = 0
    do: Literal["measure", "raise", "kill_self", "eat_memory"] = "measure"
    until: str = ""  # first of all, wait for this file, or for Slurm to have `requeued` the job


def run(params: Params) -> dict[str, Any]:
    """What this process saw, as facts."""
    deadline = time.monotonic() + LONGEST_S
    while not _may_go_on(params.until) and time.monotonic() < deadline:
        time.sleep(0.05)
    if params.do == "raise":
        raise ValueError(f"run {params.index} was told to raise")
    if params.do == "kill_self":
        os.kill(os.getpid(), signal.SIGKILL)
    if params.do == "eat_memory":
        eaten: list[bytearray] = []
        while len(eaten) < MOST_EATEN:
            eaten.append(bytearray(os.urandom(1)) * 10**8)
            time.sleep(0.1)
        time.sleep(LONGEST_S)  # until Slurm, which looks once a second or later, has ended it
    return {
        "samples_ms": {"forward": [1.0]},
        "facts": {"environment": {name: os.environ.get(name) for name in SHOWN}},
    }


def _may_go_on(until: str) -> bool:
    if until == "requeued":
        return "SLURM_RESTART_COUNT" in os.environ
    return not until or Path(until).exists()
