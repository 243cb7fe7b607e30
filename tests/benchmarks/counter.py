"""A benchmark for sweeps that also contain `toy`: some of its parameters and values are shared."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from systems.benchmark import BenchmarkParams

VERSION = 1
PRELOAD = ()


class Params(BenchmarkParams):
    size: Annotated[int, Field(ge=1)]
    mode: Literal["fast", "slow"] = "fast"
    depth: Annotated[int, Field(ge=1)] = 1


def run(params: Params) -> dict[str, Any]:
    return {"samples_ms": {"count": [float(params.size * params.depth)] * 5}}
