"""A benchmark without PRELOAD, the list of modules to import before its runs."""

from __future__ import annotations

import sys
from typing import Any, Literal

from systems.benchmark import BenchmarkParams

VERSION = 1


class Params(BenchmarkParams):
    what: Literal["silent"] = "silent"
    tag: int = 0


def run(params: Params) -> dict[str, Any]:
    return {"samples_ms": {"call": [1.0]}, "facts": {"torch": "torch" in sys.modules}}
