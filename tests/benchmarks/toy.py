"""A benchmark without torch, for the tests of sweeps, records and tables."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from systems.benchmark import BenchmarkParams

VERSION = 1
PRELOAD = ("colorsys",)  # a module that nothing else imports
Positive = Annotated[int, Field(ge=1)]


class Params(BenchmarkParams):
    size: Positive
    mode: Literal["fast", "exact"] = "fast"
    scale: float = 1  # deliberately an int: 1 and 1.0 must count as the same default
    window: Positive | None = None
    causal: bool = False
    label: str = ""
    ranks: Positive = 1

    @field_validator("label")
    @classmethod
    def _no_spaces(cls, label: str) -> str:
        if " " in label:
            raise ValueError("a label has no spaces")
        return label

    @model_validator(mode="after")
    def _window_fits(self) -> Self:
        if self.window is not None and self.window > self.size:
            raise ValueError("the window is larger than the size")
        return self


def run(params: Params) -> dict[str, Any]:
    return {
        "samples_ms": {"forward": [params.size * params.scale] * 5},
        "facts": {"preloaded": "colorsys" in sys.modules, "torch": "torch" in sys.modules},
    }
