"""Checks that a checkout has some benchmarks. Executed with the checkout's modules on the path.

Reads a JSON object from stdin: for each benchmark, its version and the parameters of its runs.
Prints the first problem, and exits with code 1 if there is one.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from pydantic import ValidationError

from jobs.sweep.benchmarks import NoBenchmark, load_benchmark


def problem(name: str, version: int, params: list[dict[str, Any]]) -> str | None:
    """Return why the checkout cannot execute the runs of a benchmark, or None if it can."""
    try:
        benchmark = load_benchmark(name)
    except NoBenchmark as error:
        return f"has no benchmark {name!r} that can be loaded: {error}"
    if benchmark.version != version:
        return f"has version {benchmark.version} of {name!r}, the present code has {version}"
    for given in params:
        try:
            benchmark.params.model_validate_json(json.dumps(given))
        except ValidationError as error:
            item = error.errors()[0]
            where = ".".join(map(str, item["loc"])) or "the parameters"
            return f"does not accept the parameters of a run of {name!r}: {where}: {item['msg']}"
    return None


if __name__ == "__main__":
    for name, wanted in json.load(sys.stdin).items():
        if (found := problem(name, **wanted)) is not None:
            print(" ".join(found.split()))
            raise SystemExit(1)
