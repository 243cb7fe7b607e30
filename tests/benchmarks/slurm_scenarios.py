"""A benchmark whose runs wait, raise, die or use up memory, for the tests on a Slurm cluster."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Literal

from systems.benchmark import BenchmarkParams

VERSION = 1
PRELOAD = ()
LONGEST_S = 240.0
MOST_EATEN = 40  # upper bound of the memory that a run uses up, in units of 100 MB
SHOWN = (
    "RANK", "MASTER_PORT", "SLURM_CPU_BIND", "CUDA_VISIBLE_DEVICES", "SLURM_CPUS_PER_TASK",
    "CONTAINER",
)  # fmt: skip


class Params(BenchmarkParams):
    """Parameters of a run. `index` only distinguishes runs."""

    index: int = 0
    do: Literal["measure", "raise", "kill_self", "eat_memory"] = "measure"
    until: str = ""  # wait first until this file exists; "requeued": until the job is requeued
    later: bool = False  # wait only after the trial of a block and the first round of a worker


def run(params: Params) -> dict[str, Any]:
    """Wait, do the action, and return environment variables of this process as facts."""
    deadline = time.monotonic() + LONGEST_S
    waits = not params.later or _is_later(params)
    while waits and not _may_go_on(params.until) and time.monotonic() < deadline:
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
        time.sleep(LONGEST_S)  # Slurm checks the memory once per second and ends the job
    return {
        "samples_ms": {"forward": [1.0]},
        "facts": {
            "environment": {name: os.environ.get(name) for name in SHOWN},
            "executable": sys.executable,
            "folder": os.getcwd(),
        },
    }


def _is_later(params: Params) -> bool:
    if json.loads(os.environ["RUN_ROUND"])["check"]:
        return False
    try:
        open(f"round-{params.index}-{os.getppid()}", "x").close()
    except FileExistsError:
        return True
    return False


def _may_go_on(until: str) -> bool:
    if until == "requeued":
        return "SLURM_RESTART_COUNT" in os.environ
    return not until or Path(until).exists()
