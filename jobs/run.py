"""A run, which is one point of a sweep's grid, and the resources that it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """The resources and processes of a job. Only runs of the same shape can share a job."""

    nodes: int = 1
    gpus_per_node: int = 0
    nproc_per_node: int | None = None  # torchrun processes; None: one process without torchrun
    cpus_per_task: int | None = None
    mem_gb: float | None = None  # host memory per node in GiB
    timeout_min: int | None = None  # time limit of the job; None: derived from the runs' timeouts

    def __str__(self) -> str:
        parts = [f"{self.nodes} node{'s' if self.nodes > 1 else ''}"]
        if self.gpus_per_node:
            parts.append(
                f"{self.gpus_per_node} GPU{'s' if self.gpus_per_node > 1 else ''} per node"
            )
        if self.nproc_per_node:
            parts.append(f"{self.nproc_per_node} processes per node")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Run:
    """One point of the grid: a benchmark, its parameters, and the resources for running it."""

    id: str
    benchmark: str
    version: int  # of the benchmark
    params: dict[str, Any]  # all parameters, including those at their default
    shape: Shape
    timeout_s: float  # time limit of this run

    def label(self, names: list[str] | None = None) -> str:
        """Return the benchmark and the named parameters (default: all) as text.

        Example: `attention seq_len=128 dtype=bf16`. Names that the benchmark lacks are left out.
        """
        shown = {k: self.params[k] for k in (names or self.params) if k in self.params}
        return " ".join([self.benchmark, *(f"{k}={v}" for k, v in shown.items())])


def varying(runs: list[Run]) -> list[str]:
    """Return the names of the parameters that have more than one value among these runs.

    A parameter that only some benchmarks have is included only if its values differ among them.
    """
    first: dict[str, Any] = {}
    differ: set[str] = set()
    for run in runs:
        for name, value in run.params.items():
            if first.setdefault(name, value) != value:
                differ.add(name)
    return [name for name in first if name in differ]
