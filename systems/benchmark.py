"""What every benchmark module shares: the base of its `Params`, and the ways to say no.

A benchmark is one file in this folder with
    VERSION = 1                       raised when what is measured, or a default, changes
    class Params(BenchmarkParams)     its parameters, typed, with defaults
    def run(params) -> dict           the measurement; returns facts, as jobs/results/record.py lists
    PRELOAD = ("a.module",)           optional, ("torch",) where it is missing: what to import once
                                      for all runs of a job, before the first; () is nothing. It
                                      must leave CUDA alone. Ranks of torchrun import for themselves
It imports torch inside `run` only: a login node reads `Params` without torch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

# The names in `systems.kernels.flash_attention.ATTENTIONS`, which needs torch: a test holds the two
# to be equal.
AttentionName = Literal[
    "naive", "flash_pytorch", "flash_triton", "flash_hopper", "flex",
    "sdpa", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math",
]  # fmt: skip

ARTIFACTS = "RUN_ARTIFACTS"  # the environment variable by which the launcher names the folder


class BenchmarkParams(BaseModel):
    """Parameters of one run: strict (no text for a number), frozen, and nothing unknown."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Unsupported(Exception):
    """This machine, or this library, cannot do what the run asks. The message says why."""


class WrongOutput(Exception):
    """The output differs from the reference by more than the tolerance: no time of it counts."""


def artifacts_folder() -> Path:
    """The folder for files that a run leaves: a trace, a snapshot of memory. Asking creates it.

    The launcher names one for each attempt, the same for all of its ranks, and the record tells of
    it. Without the launcher it is `./artifacts`.
    """
    folder = Path(os.environ.get(ARTIFACTS) or "artifacts")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
