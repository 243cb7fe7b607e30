"""Base class of benchmark parameters, and the exceptions that a benchmark raises.

A benchmark is one module in systems/benchmarks. It defines:
    VERSION = 1                       Increase it when the measurement or a default value changes.
    class Params(BenchmarkParams)     Typed parameters with their defaults.
    def run(params) -> dict           The measurement. The keys of the dict that it returns are the
                                      fields of `Measurements` in jobs/results/record.py.
    def predict(params) -> dict       Optional: values that tables show as predicted.NAME. It must
                                      not import torch.
    PRELOAD = ("a.module",)           Optional, default ("torch",): modules that a job imports once
                                      for all of its runs. They must not initialize CUDA. Ranks that
                                      torchrun starts do not share these imports.

Benchmark modules import torch only inside functions, so that a login node without torch can read
`Params`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

# Same names as the keys of `systems.kernels.flash_attention.ATTENTIONS`, which needs torch to be
# imported. A test compares the two.
AttentionName = Literal[
    "naive", "flash_pytorch", "flash_triton", "flash_hopper", "flex",
    "sdpa", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math",
]  # fmt: skip

ARTIFACTS = "RUN_ARTIFACTS"  # environment variable with the path of the artifacts folder


class BenchmarkParams(BaseModel):
    """Base class of a run's parameters: frozen, strictly typed, without unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Unsupported(Exception):
    """Raised if this machine or a library does not support the parameters; the message says why."""


class WrongOutput(Exception):
    """Raised if a result differs from its reference by more than the tolerance."""


def artifacts_folder() -> Path:
    """Return the folder for files that a run writes, such as traces; create it if needed.

    The launcher sets RUN_ARTIFACTS to a separate folder for each attempt, shared by all of its
    ranks, and stores the folder's path in the record. Without RUN_ARTIFACTS the folder is
    `./artifacts`.
    """
    folder = Path(os.environ.get(ARTIFACTS) or "artifacts")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
