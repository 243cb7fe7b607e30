"""Base class of benchmark parameters, and the exceptions that a benchmark raises.

A benchmark is one Python module, for example in systems/benchmarks. It defines:

    VERSION = 1                       Version of the benchmark. Increase it when the measurement or
                                      a default value changes.
    class Params(BenchmarkParams)     Typed parameters with their defaults.
    def run(params) -> dict           Measure and return the results. The keys of the dict are the
                                      fields of `Measurements` in jobs/results/record.py, such as
                                      `samples_ms`. Results without a field of their own are in
                                      `facts`, a dict of JSON values by name.
    def predict(params) -> dict       Optional. Return predicted values by name. Tables can show
                                      them as predicted.NAME. It must not import torch.
    PRELOAD = ("a.module",)           Optional, default ("torch",). Modules that a job imports once
                                      for all of its runs, to save time. They must not initialize
                                      CUDA. Ranks that torchrun starts do not share these imports.

Many results are listed by phase. A phase is a part of the benchmark that is measured separately,
for example "forward".

Benchmark modules import torch only inside functions, so that a login node without torch can read
`Params`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

# Names of the attention implementations: the keys of `systems.kernels.flash_attention.ATTENTIONS`.
# They are repeated here because that module imports torch. A test compares the two lists.
AttentionName = Literal[
    "naive", "flash_pytorch", "flash_triton", "flash_hopper", "flex",
    "sdpa", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "sdpa_math",
]  # fmt: skip

ARTIFACTS = "RUN_ARTIFACTS"  # environment variable with the path of the artifacts folder


class BenchmarkParams(BaseModel):
    """Base class of a run's parameters.

    Objects are immutable. Unknown parameter names and values of a wrong type are errors.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Unsupported(Exception):
    """Raised if this machine or a library does not support the parameters; the message says why."""


class WrongOutput(Exception):
    """Raised if a result differs from its reference by more than the tolerance."""


def artifacts_folder() -> Path:
    """Return the folder for files that a run writes, such as traces; create it if needed.

    The environment variable RUN_ARTIFACTS contains the path of the folder. The launcher sets this
    variable and stores the path in the record. Each attempt of a run has a separate folder, which
    all ranks of the attempt share. If RUN_ARTIFACTS is not set, the folder is `./artifacts`.
    """
    folder = Path(os.environ.get(ARTIFACTS) or "artifacts")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
