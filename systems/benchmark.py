"""Base class of benchmark parameters, and the exceptions that a benchmark raises.

A benchmark is one Python module, for example in systems/benchmarks. It defines:

    VERSION = 1                       Version of the benchmark. Increase it when the measurement or
                                      a default value changes.
    class Params(BenchmarkParams)     Typed parameters with their defaults.
    def run(params) -> dict           Measure and return the results. The keys of the dict are
                                      fields of `Measurements` in jobs/results/record.py, such as
                                      `samples_ms`. The field `facts` is a dict of JSON values by
                                      name, for all results that have no field of their own.
    def predict(params) -> dict       Optional. Return predicted values by name. A table of results
                                      can have a column `predicted.NAME`. The function must not
                                      import torch.
    def sources(params) -> Sources    Optional. Name the modules that a run with these parameters
                                      uses, so that an edit of other modules does not make its
                                      results stale. Without it, all modules count that the module
                                      of the benchmark imports. The function must not import torch.
    PRELOAD = ("a.module",)           Optional, default ("torch",). A job imports these modules once
                                      for all of its runs, to save time. torch imports some late:
                                      torch.fx.experimental.symbolic_shapes in the first backward,
                                      torch._dynamo for the first optimizer. They must not
                                      initialize CUDA or compute, because runs are forked later.
                                      Ranks that torchrun starts import them again.

Many results are listed by phase. A phase is a part of the benchmark that is measured separately,
for example "forward".

Benchmark modules import torch only inside functions, so that a login node without torch can read
`Params`.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict

from systems.attentions import ATTENTIONS
from systems.external.parameter import Implementation

# Type of a parameter that selects an attention: one of these names, or a reference to a function
# outside this project, such as my_kernels/flash.py:MyFlash.
AttentionChoice = Annotated[str, Implementation("attention", tuple(ATTENTIONS))]

ARTIFACTS = "RUN_ARTIFACTS"  # environment variable with the path of the artifacts folder
ROUND = "RUN_ROUND"  # environment variable with the options of a round of a block, as JSON


class BenchmarkParams(BaseModel):
    """Base class of the parameters of a benchmark, which are immutable.

    A parameter with an unknown name or a value of a wrong type raises an error.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


@dataclass(frozen=True)
class Sources:
    """The modules of which the source counts for the results of a run.

    The module of the benchmark and all modules that it imports count, except `left_out`. Code
    outside this project that a parameter names counts with everything that it imports.
    """

    modules: tuple[str, ...] = ()  # dotted names of modules that count, too, with their imports
    # Dotted names of modules and packages that the run does not use, although a module imports
    # them. What only they import does not count either.
    left_out: tuple[str, ...] = ()


class Unsupported(Exception):
    """Raised if this machine or a library does not support the parameters; the message says why."""


class WrongOutput(Exception):
    """Raised if a result is wrong, for example if it differs too much from its reference."""


@dataclass(frozen=True)
class RoundOptions:
    """What a run includes, if it is executed several times in a block, see `jobs.block`."""

    check: bool = True  # whether to check the output; the block's trial does
    sustained_s: float = 0.0  # duration of the measurement of sustained speed of each phase
    hold_ms: float = 0.0  # time for which the GPU is kept busy before a timed call; 0: own choice
    # Unused. Without it, the code of all benchmarks would differ from that of earlier records.
    shared: dict[str, float] = field(default_factory=dict)


def round_options() -> RoundOptions:
    """Return the options of the current run: those in RUN_ROUND, or without it the defaults."""
    return RoundOptions(**json.loads(os.environ.get(ROUND) or "{}"))


def artifacts_folder() -> Path:
    """Return the folder for files that a run writes, such as traces; create it if needed.

    It is that of RUN_ARTIFACTS, by default `./artifacts`. The launcher stores its path in the
    record of the run. Each attempt of a run has a separate folder, which all ranks of the attempt
    share.
    """
    folder = Path(os.environ.get(ARTIFACTS) or "artifacts")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
