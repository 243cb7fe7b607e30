"""A `Sweep` -> its runs: the union of its blocks' products, each run with a stable id.

A run's id hashes the benchmark, its version, and those validated parameters that differ from their
defaults. So it does not depend on the order of keys, the executor, the partition or the file, and
a new parameter with a default leaves old ids as they are.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from jobs.benchmarks import Benchmark
from jobs.conditions import Condition, ConditionError
from jobs.schema import Case, Shuffle, Sweep
from jobs.strict_yaml import Document, InputError, Position, Problem
from jobs.strict_yaml import Path as DataPath
from jobs.sweep import LoadedSweep
from jobs.validate import exclusions, literal_check

STARTUP_MIN = 2  # minutes a job gets on top of its runs' timeouts: imports, a slow file system


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


@dataclass(frozen=True)
class Run:
    """One point of the grid: what to measure, and what it needs."""

    id: str
    benchmark: str
    version: int
    params: dict[str, Any]  # complete: defaults filled in
    shape: Shape
    timeout_s: float

    def label(self, names: list[str] | None = None) -> str:
        shown = {k: self.params[k] for k in (names or self.params)}
        return " ".join([self.benchmark, *(f"{k}={v}" for k, v in shown.items())])


@dataclass(frozen=True)
class Expansion:
    """The runs of a sweep, in the order they are to be run, and how many were left out."""

    runs: list[Run]
    excluded: int
    filtered: int
    duplicates: int


def run_id(benchmark: Benchmark, params: dict[str, Any]) -> str:
    """Sixteen hex digits that stand for (benchmark, version, parameters unlike their defaults)."""
    missing = object()
    defaults = benchmark.json_defaults
    told = {k: v for k, v in params.items() if defaults.get(k, missing) != v}
    text = json.dumps([benchmark.name, benchmark.version, told], sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def expand(loaded: LoadedSweep) -> Expansion:
    """The runs of a sweep.

    Raises:
        InputError: a combination that the benchmark refuses, a reference to a parameter that is
            not a number, or nothing left to run.
    """
    sweep, benchmark, document = loaded.sweep, loaded.benchmark, loaded.document
    problems: dict[Problem, None] = {}
    drop = exclusions(sweep, benchmark)
    keep = (
        Condition(sweep.filter, benchmark.fields, literal_check(benchmark))
        if sweep.filter
        else None
    )
    runs: dict[str, Run] = {}
    excluded = filtered = duplicates = 0
    for path, case, points in _blocks(sweep):
        for point in points:
            try:
                params = benchmark.params.model_validate(point).model_dump(mode="json")
            except ValidationError as error:
                _params_problems(error, point, path, document, problems)
                continue
            try:
                if any(condition(params) for condition in drop):
                    excluded += 1
                    continue
                if keep is not None and not keep(params):
                    filtered += 1
                    continue
            except ConditionError as error:
                where = (
                    Position("--filter")
                    if keep and keep.text in str(error)
                    else document.at(("exclude",))
                )
                problems[Problem(where, str(error))] = None
                continue
            identity = run_id(benchmark, params)
            if identity in runs:
                duplicates += 1
                continue
            shape = _shape(sweep, case, params, path, document, problems)
            timeout_s = case.timeout_s if case and case.timeout_s else sweep.timeout_s
            runs[identity] = Run(
                identity, benchmark.name, benchmark.version, params, shape, timeout_s
            )
    if not problems and not runs:
        left_out = [f"{excluded} excluded"] * bool(excluded) + [f"{filtered} filtered out"] * bool(
            filtered
        )
        why = f" ({', '.join(left_out)})" if left_out else ""
        where = Position("--filter") if filtered else document.at(())
        problems[Problem(where, f"the sweep has no runs{why}{_values_seen(sweep, keep)}")] = None
    if problems:
        raise InputError(list(problems))
    ordered = list(runs.values())
    if isinstance(sweep.order, Shuffle):
        random.Random(sweep.order.shuffle).shuffle(ordered)
    return Expansion(ordered, excluded, filtered, duplicates)


def _blocks(sweep: Sweep) -> Iterator[tuple[DataPath, Case | None, Iterator[dict[str, Any]]]]:
    if not sweep.cases:
        yield (), None, _product(sweep.fixed, sweep.grid, sweep.zip)
    for i, case in enumerate(sweep.cases):
        mine = {*case.fixed, *case.grid, *case.zip}
        # A parameter the case sets leaves every section of the sweep's, but keeps its place in
        # the grid's order if the case gives it a list too.
        fixed = {k: v for k, v in sweep.fixed.items() if k not in mine} | case.fixed
        grid = {
            k: case.grid.get(k, v) for k, v in sweep.grid.items() if k in case.grid or k not in mine
        }
        zipped = {k: v for k, v in sweep.zip.items() if k not in mine}
        yield ("cases", i), case, _product(fixed, grid | case.grid, zipped, case.zip)


def _product(
    fixed: dict[str, Any], grid: dict[str, list[Any]], *zips: dict[str, list[Any]]
) -> Iterator[dict[str, Any]]:
    """fixed x grid x each zip, the last grid key varying fastest, zips slowest."""
    groups = [
        [dict(zip(z, row, strict=True)) for row in zip(*z.values(), strict=True)] for z in zips if z
    ]
    groups += [[{name: value} for value in values] for name, values in grid.items()]
    for combination in itertools.product(*groups):
        point = dict(fixed)
        for part in combination:
            point.update(part)
        yield point


def _params_problems(
    error: ValidationError,
    point: dict[str, Any],
    block: DataPath,
    document: Document,
    problems: dict[Problem, None],
) -> None:
    for item in error.errors():
        name = item["loc"][0] if item["loc"] else None
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "missing":
            where = document.at(block)
            message = f"parameter {name!r} is required by the benchmark; set it in fixed or grid"
        elif name is not None:
            candidates = [
                (*b, axis, name) for b in (block, ()) for axis in ("fixed", "grid", "zip")
            ]
            places = [p for p in candidates if p in document.positions]
            where = document.at(places[0] if places else block)
            message = f"{name}: given {point.get(str(name))!r}, {message}"
        else:
            where = document.at(
                (*block, "grid") if (*block, "grid") in document.positions else block
            )
        problems[Problem(where, message)] = None


def _shape(
    sweep: Sweep,
    case: Case | None,
    params: dict[str, Any],
    path: DataPath,
    document: Document,
    problems: dict[Problem, None],
) -> Shape:
    wanted: dict[str, Any] = {**sweep.resources.model_dump(), **sweep.launch.model_dump()}
    if case is not None:
        wanted |= case.resources | case.launch
    wanted.pop("tasks_per_node", None)
    for key, value in wanted.items():
        if isinstance(value, str):
            given = params[value[1:]]
            least = 0 if key == "gpus_per_node" else 1
            if isinstance(given, bool) or not isinstance(given, (int, float)) or given < least:
                section = "launch" if key == "nproc_per_node" else "resources"
                here = (*path, section, key)
                where = document.at(here if here in document.positions else (section, key))
                message = f"{key}: {value} is {given!r} here, expected a number of at least {least}"
                problems[Problem(where, message)] = None
                given = 1
            wanted[key] = given
    return Shape(**wanted)


def _values_seen(sweep: Sweep, keep: Condition | None) -> str:
    if keep is None:
        return ""
    seen: dict[str, list[Any]] = {}
    for block in (sweep, *sweep.cases):
        for name, value in block.fixed.items():
            seen.setdefault(name, []).append(value)
        for name, values in (*block.grid.items(), *block.zip.items()):
            seen.setdefault(name, []).extend(values)
    named = {k: list(dict.fromkeys(v)) for k, v in seen.items() if k in keep.text}
    return "".join(f"; {name} takes {values}" for name, values in named.items())


def job_timeout_min(shape: Shape, timeouts_s: list[float]) -> int:
    """Minutes a job asks for: as given, else what its runs may take at worst."""
    return shape.timeout_min or math.ceil(sum(timeouts_s) / 60) + STARTUP_MIN


def varying(runs: list[Run]) -> list[str]:
    """The parameters in which these runs differ, in the benchmark's order."""
    if not runs:
        return []
    first = runs[0].params
    return [k for k in first if any(run.params.get(k) != first[k] for run in runs)]
