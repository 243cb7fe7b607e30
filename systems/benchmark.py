"""Base classes of benchmark modules: `BenchmarkParams`, and the exceptions that `run` raises.

A benchmark is one file in systems/benchmarks with
    VERSION = 1                       raise it when what is measured, or a default, changes
    class Params(BenchmarkParams)     its parameters, typed, with defaults
    def run(params) -> dict           the measurement; returns facts (jobs/results/record.py)
    PRELOAD = ("a.module",)           optional, by default ("torch",): modules to import once for
                                      all runs of a job. They must not initialise CUDA. Ranks of
                                      torchrun import on their own
It imports torch inside `run` only, so that a login node can read `Params` without torch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

# The names in `systems.kernels.flash_attention.ATTENTIONS`, which needs torch; a test compares the
# two.
AttentionName = Literal[
    "naive", "flash_pytorch", "flash_triton", "flash_hopper", "flex",
    "sdpa", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math",
]  # fmt: skip

ARTIFACTS = "RUN_ARTIFACTS"  # the environment variable by which the launcher names the folder


class BenchmarkParams(BaseModel):
    """Parameters of one run: frozen, strictly typed, and unknown names are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Unsupported(Exception):
    """Raised if this machine or a library cannot do what the run asks; the message says why."""


class WrongOutput(Exception):
    """Raised if an output differs from its reference by more than the tolerance."""


def artifacts_folder() -> Path:
    """Return the folder for files that a run leaves, such as traces; create it if needed.

    The launcher sets one for each attempt, the same for all of its ranks, and the record lists its
    files. Without the launcher it is `./artifacts`.
    """
    folder = Path(os.environ.get(ARTIFACTS) or "artifacts")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
