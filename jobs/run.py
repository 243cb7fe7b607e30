"""Runs of a benchmark, the ids that records and commands use for them, and their resources."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from jobs.formatting import counted, format_scalar


@dataclass(frozen=True)
class Shape:
    """The resources that a run needs. All runs of one job have an equal `Shape`."""

    nodes: int = 1
    gpus_per_node: int = 0
    nproc_per_node: int | None = None  # torchrun processes per node; None: one process, no torchrun
    cpus_per_task: int | None = None  # number of CPUs per node; None: the cluster's default
    mem_gb: float | None = None  # host memory per node in GiB
    timeout_min: int | None = None  # time limit; None: computed from the timeouts of the runs
    gpu_type: str | None = None  # Slurm's name of the GPU model; None: any
    exclusive: bool = False  # whether no other job runs on the nodes at the same time

    @property
    def gpus(self) -> int:
        """The number of GPUs on all nodes."""
        return self.nodes * self.gpus_per_node

    def __str__(self) -> str:
        parts = [counted(self.nodes, "node")]
        if self.gpus_per_node:
            kind = f"{self.gpu_type} GPU" if self.gpu_type else "GPU"
            parts.append(f"{counted(self.gpus_per_node, kind)} per node")
        if self.nproc_per_node:
            parts.append(f"{counted(self.nproc_per_node, 'process')} per node")
        if self.cpus_per_task:
            parts.append(f"{counted(self.cpus_per_task, 'CPU')} per node")
        if self.mem_gb:
            parts.append(f"{self.mem_gb:g} GiB of memory per node")
        if self.exclusive:
            parts.append("no other jobs")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Run:
    """A benchmark with a value for each parameter, and the resources that it needs."""

    id: str
    benchmark: str
    version: int  # version of the benchmark
    params: dict[str, Any]  # all parameters, including those with their default value
    shape: Shape
    timeout_s: float  # time limit of this run, in seconds
    # References to code outside this project that the run measures, such as my_ddp.py:MyDDP.
    code: tuple[str, ...] = ()
    checkout: str = ""  # name of another checkout that executes the run; empty: the present code

    def label(
        self, names: list[str] | None = None, short: Mapping[str, str] = MappingProxyType({})
    ) -> str:
        """Return the benchmark and parameters of the run, e.g. `attention seq_len=128 dtype=bf16`.

        `names` are the parameters to include, by default or if empty all. `short` has texts to show
        instead of values, from `jobs.code.short_names`.
        """
        shown = {k: self.params[k] for k in (names or self.params) if k in self.params}
        shown = {k: short.get(v, v) if isinstance(v, str) else v for k, v in shown.items()}
        texts = [f"{name}={format_scalar(value)}" for name, value in shown.items()]
        code = [f"code={self.checkout}"] if self.checkout else []
        return " ".join([self.benchmark, *texts, *code])


def run_id(benchmark: str, version: int, params: dict[str, Any], defaults: dict[str, Any]) -> str:
    """Return the id of a run, 16 hexadecimal digits: a hash of benchmark, version and parameters.

    Parameters equal to their default are not hashed, so adding a parameter with a default to a
    benchmark does not change existing ids. The id does not depend on the order of the keys, the
    sweep file, the executor or the partition. Parameters and defaults are JSON values.
    """
    missing = object()
    # Compare by repr, because 1, 1.0 and True are equal in Python.
    unlike = {k: v for k, v in params.items() if repr(defaults.get(k, missing)) != repr(v)}
    text = json.dumps([benchmark, version, unlike], sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def varying(runs: list[Run]) -> list[str]:
    """Return the names of the parameters whose values differ between the runs that have them."""
    first: dict[str, Any] = {}
    differ: set[str] = set()
    for run in runs:
        for name, value in run.params.items():
            if first.setdefault(name, value) != value:
                differ.add(name)
    return [name for name in first if name in differ]
