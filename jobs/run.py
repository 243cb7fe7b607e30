"""A run: one point of a sweep's grid, and what it needs to launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """What a job needs to launch; runs of one shape may share a job."""

    nodes: int = 1
    gpus_per_node: int = 0
    nproc_per_node: int | None = None  # None: one process, no torchrun
    cpus_per_task: int | None = None
    mem_gb: float | None = None
    timeout_min: int | None = None

    def __str__(self) -> str:
        parts = [f"{self.nodes} node{'s' if self.nodes > 1 else ''}"]
        if self.gpus_per_node:
            parts.append(f"{self.gpus_per_node} GPU{'s' if self.gpus_per_node > 1 else ''} a node")
        if self.nproc_per_node:
            parts.append(f"{self.nproc_per_node} processes a node")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Run:
    """One point of the grid: what to measure, and what it needs."""

    id: str
    benchmark: str
    version: int
    params: dict[str, Any]  # complete: defaults filled in
    shape: Shape
    timeout_s: float

    def label(self, names: list[str] | None = None) -> str:
        shown = {k: self.params[k] for k in (names or self.params) if k in self.params}
        return " ".join([self.benchmark, *(f"{k}={v}" for k, v in shown.items())])


def varying(runs: list[Run]) -> list[str]:
    """The parameters in which these runs differ, in their benchmarks' order: not everybody who has
    one has the same."""
    first: dict[str, Any] = {}
    differ: set[str] = set()
    for run in runs:
        for name, value in run.params.items():
            if first.setdefault(name, value) != value:
                differ.add(name)
    return [name for name in first if name in differ]
