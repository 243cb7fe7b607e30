"""Finding a benchmark by name and reading its parameters, without importing torch."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from jobs.conditions import nearest


@dataclass(frozen=True)
class Benchmark:
    """A benchmark module, seen from the launcher: its name, version and parameters."""

    name: str
    version: int
    params: type[BaseModel]
    json_defaults: dict[str, Any]  # of the parameters that have one, as JSON shows them

    @property
    def fields(self) -> list[str]:
        return list(self.params.model_fields)


def benchmark_module(name: str) -> ModuleType:
    """The module of a benchmark: `systems.benchmarks.<name>`, or a dotted name of one's own.

    Raises:
        LookupError: naming the benchmarks that exist.
    """
    path = name if "." in name else f"systems.benchmarks.{name}"
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not (path == error.name or path.startswith(error.name + ".")):
            raise  # the benchmark exists; something that it imports does not
        raise LookupError(f"no benchmark {name!r}{nearest(name, known_benchmarks())}") from None
    if not hasattr(module, "Params") or not hasattr(module, "run"):
        raise LookupError(
            f"{path} is no benchmark: it needs Params and run{nearest(name, known_benchmarks())}"
        )
    return module


def known_benchmarks() -> list[str]:
    """Names of the benchmarks in systems/benchmarks."""
    package = importlib.import_module("systems.benchmarks")
    names = []
    for info in pkgutil.iter_modules(package.__path__):
        if hasattr(importlib.import_module(f"systems.benchmarks.{info.name}"), "run"):
            names.append(info.name)
    return names


def load_benchmark(name: str) -> Benchmark:
    """Read a benchmark's parameters. Imports its module, which must not import torch."""
    module = benchmark_module(name)
    fields = module.Params.model_fields
    optional = {
        k: f.get_default(call_default_factory=True)
        for k, f in fields.items()
        if not f.is_required()
    }
    shown = module.Params.model_construct(**optional).model_dump(mode="json", include=set(optional))
    return Benchmark(name, int(getattr(module, "VERSION", 1)), module.Params, shown)
