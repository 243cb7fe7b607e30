"""What every benchmark module shares: the base of its `Params`, and the ways to say no.

A benchmark is one file in this folder with
    VERSION = 1                       raised when what is measured, or a default, changes
    class Params(BenchmarkParams)     its parameters, typed, with defaults
    def run(params) -> dict           the measurement; returns facts (`jobs.record.Measurements`)
It imports torch inside `run` only: a login node reads `Params` without torch.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class BenchmarkParams(BaseModel):
    """Parameters of one run: strict (no text for a number), frozen, and nothing unknown."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Unsupported(Exception):
    """This machine, or this library, cannot do what the run asks. The message says why."""


class WrongOutput(Exception):
    """The output differs from the reference by more than the tolerance; so nothing was timed."""
