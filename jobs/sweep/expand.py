"""Expands a sweep into its runs. A run is one combination of a benchmark and its parameters.

The scopes of a sweep are its cases, or the sweep itself if it has no cases. The runs of a scope are
the Cartesian product of the parameters in `grid` and the combinations in `zip`. The runs of a sweep
are the union of those of its scopes. The id of a run stays the same if a sweep is expanded again.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from jobs.block import Block
from jobs.errors import ENOUGH, InputError, Problem
from jobs.run import Run, Shape, run_id
from jobs.sweep.benchmarks import Benchmark, Benchmarks
from jobs.sweep.conditions import Condition, ConditionError, condition_of
from jobs.sweep.form_blocks import form_blocks
from jobs.sweep.load import LoadedSweep
from jobs.sweep.resources import wanted_instead
from jobs.sweep.schema import Case, Shuffle, Sweep
from jobs.sweep.strict_yaml import DataPath, below
from jobs.sweep.views import run_faults

MAX_RUNS = 1_000_000  # a larger sweep is probably a typo


@dataclass(frozen=True)
class Expansion:
    """The runs of a sweep in execution order, and how many combinations were left out."""

    runs: list[Run]
    excluded: int  # combinations that match an entry of `exclude`
    filtered: int  # combinations that the filter leaves out
    duplicates: int  # combinations that repeat an earlier run
    blocks: list[Block]  # groups of runs that are measured in turn
    sustained: frozenset[str]  # ids of runs that are measured over seconds, if they are in a block


def expand(loaded: LoadedSweep, with_blocks: bool = True) -> Expansion:
    """Return the runs of a sweep. Raises InputError with all errors that only the runs show.

    With another checkout (--against), which forms other blocks, the sweep's need no baseline.
    """
    return _Expander(loaded).expansion(with_blocks)


class _Expander:
    """Expands one sweep into its runs, and collects the errors."""

    def __init__(self, loaded: LoadedSweep):
        self.sweep, self.benchmarks = loaded.sweep, loaded.benchmarks
        self.document = loaded.document
        self.scopes = list(_scopes(self.sweep, self.benchmarks))
        self.exclusions = [
            self.condition(item, "exclude", i) for i, item in enumerate(self.sweep.exclude)
        ]
        text = self.sweep.filter
        self.filter = self.condition(text, "filter") if text else None
        self.runs: dict[str, Run] = {}
        self.origin: dict[str, DataPath] = {}  # path of the scope of each run, by run id
        self.excluded = self.filtered = self.duplicates = 0
        # For each problem, the parameter combinations that have it, as text.
        self.problems: dict[Problem, list[str]] = {}

    def condition(self, given: str | dict[str, Any], *path: str | int) -> Condition:
        """Return a condition of the sweep. It may be valid no more when a run is retried."""
        try:
            return condition_of(given, self.benchmarks)
        except ConditionError as error:
            raise InputError([Problem(self.document.at(path), str(error))]) from None

    def expansion(self, with_blocks: bool) -> Expansion:
        points = sum(math.prod(map(len, scope.groups)) for scope in self.scopes)
        paired = self.sweep.blocks
        times = self.sweep.repeats if paired is None else paired.most_rounds
        if points * times > MAX_RUNS:
            of = "repeats" if paired is None else "rounds"
            got = f"got {points} combinations x {times} {of}; make the lists shorter"
            what = f"a sweep must have at most {MAX_RUNS} runs, {got}"
            raise InputError([Problem(self.document.at(()), what)])
        for scope in self.scopes:
            for combination in itertools.product(*scope.groups):
                self.add(scope, {k: v for part in combination for k, v in part.items()})
                if len(self.problems) >= ENOUGH:
                    raise self.error()
        self.check_views()
        sustained = frozenset(self.sustained())
        if not self.runs and not self.problems:
            self.refuse(*self.nothing_left())
        if self.problems:
            raise self.error()
        ordered = list(self.runs.values())
        if isinstance(self.sweep.order, Shuffle):
            random.Random(self.sweep.order.shuffle).shuffle(ordered)
        blocks: list[Block] = []
        if with_blocks:
            formed = form_blocks(ordered, self.sweep, self.document, self.left_out_by)
            blocks = [
                replace(block, sustained=tuple(run for run in block.runs if run in sustained))
                for block in formed
            ]
        if self.document.problems:
            raise InputError(self.document.problems)
        counts = (self.excluded, self.filtered, self.duplicates)
        return Expansion(ordered, *counts, blocks, sustained)

    def sustained(self) -> Iterator[str]:
        """Yield the ids of the runs that satisfy the condition of `blocks.sustained`."""
        keys = self.sweep.blocks.sustained if self.sweep.blocks is not None else None
        if keys is None:
            return
        path = ("blocks", "sustained", "where")
        where = None if keys.where is None else self.condition(keys.where, *path)
        interleaved = set(self.sweep.blocks.interleave) if self.sweep.blocks is not None else set()
        for run in self.runs.values():
            if interleaved and interleaved.isdisjoint(run.params):
                continue  # in no block
            values = {"run.benchmark": run.benchmark, **run.params}
            if where is None or self.holds(where, values, path):
                yield run.id

    def error(self) -> InputError:
        found = []
        for problem, points in self.problems.items():
            more = f" and {len(points) - 1} more" if len(points) > 1 else ""
            example = f" ({points[0]}{more})" if points else ""
            found.append(Problem(problem.position, problem.message + example))
        return InputError(found)

    def add(self, scope: _Scope, point: dict[str, Any]) -> None:
        benchmark = scope.benchmark
        try:
            params = benchmark.params.model_validate(point).model_dump(mode="json")
        except ValidationError as error:
            # A combination that the benchmark rejects is no error if exclude or the filter removes
            # the combination.
            complete = benchmark.json_defaults | point
            is_complete = len(complete) == len(benchmark.fields)
            if not (is_complete and self.count_if_left_out(benchmark, complete)):
                self.note_refusal(error, point, scope.path)
            return
        if self.count_if_left_out(benchmark, params):
            return
        identity = run_id(benchmark.name, benchmark.version, params, benchmark.json_defaults)
        shape = self.shape(scope, params)
        if identity in self.runs:
            self.duplicates += 1
            found = self.runs[identity]
            if (shape, scope.timeout_s) != (found.shape, found.timeout_s):
                first = ".".join(map(str, self.origin[identity]))
                what = f"the same run is in {first} with other resources, launch or timeout_s"
                self.refuse(scope.path, f"{what}; remove one", point)
            return
        code = benchmark.references(params)
        name, version = benchmark.name, benchmark.version
        self.runs[identity] = Run(identity, name, version, params, shape, scope.timeout_s, code)
        self.origin[identity] = scope.path

    def refuse(self, path: DataPath, what: str, point: dict[str, Any] | None = None) -> None:
        """Collect an error. With `point`, the message shows this combination as an example."""
        points = self.problems.setdefault(Problem(self.document.at(path), what), [])
        if point is not None:
            varied = {k: v for k, v in point.items() if k not in self.sweep.fixed}
            points.append(" ".join(f"{k}={v}" for k, v in (varied or point).items()))

    def count_if_left_out(self, benchmark: Benchmark, params: dict[str, Any]) -> bool:
        key = self.left_out_by(benchmark.name, params)
        self.excluded += key == "exclude"
        self.filtered += key == "filter"
        return key is not None

    def left_out_by(self, benchmark: str, params: dict[str, Any]) -> str | None:
        """Return the key that leaves out a combination: `exclude`, `filter` or None."""
        values = {"run.benchmark": benchmark, **params}
        if any(self.holds(one, values, ("exclude", i)) for i, one in enumerate(self.exclusions)):
            return "exclude"
        kept = self.filter is None or self.holds(self.filter, values, ("filter",))
        return None if kept else "filter"

    def holds(self, condition: Condition, params: dict[str, Any], path: DataPath) -> bool:
        try:
            return condition(params)
        except ConditionError as error:
            self.refuse(path, str(error))
            return False

    def check_views(self) -> None:
        """Check the tables and plots of the sweep against its runs, and collect the errors."""
        for key in ("tables", "plots"):
            for i, view in enumerate(getattr(self.sweep, key)):
                name = self.benchmarks.of(view.benchmark).name
                runs = [run for run in self.runs.values() if run.benchmark == name]
                for fault in below(run_faults(view, runs), key, i):
                    self.refuse(fault.path, fault.what)

    def note_refusal(self, error: ValidationError, point: dict[str, Any], scope: DataPath) -> None:
        """Collect the errors of a combination that the benchmark rejects."""
        for item in error.errors():
            name = str(item["loc"][0]) if item["loc"] else None
            message = item["msg"].removeprefix("Value error, ")
            if item["type"] == "missing":
                what = f"parameter {name!r} is required by the benchmark; set it in fixed or grid"
                self.refuse(scope, what)
            elif name is not None:
                self.refuse(scope, f"{name} cannot be {point.get(name)!r}: {message}")
            else:
                self.refuse((*scope, "grid"), message, point)

    def shape(self, scope: _Scope, params: dict[str, Any]) -> Shape:
        """Return the resources of a run, with the values of its parameters for `$PARAMETER`."""
        wanted = dict(scope.resources)
        for key, value in wanted.items():
            if not isinstance(value, str) or not value.startswith("$"):
                continue
            given = params[value[1:]]
            wrong = wanted_instead(key, given)
            if wrong:
                section = "launch" if key == "nproc_per_node" else "resources"
                where = (*scope.path, section, key) if key in scope.own else (section, key)
                self.refuse(where, f"{key} must be {wrong}, got {value} = {given!r}")
                given = None
            wanted[key] = given
        if not wanted["gpus_per_node"]:
            wanted["gpu_type"] = None
        return Shape(**wanted)

    def nothing_left(self) -> tuple[DataPath, str]:
        counts = {"exclude": self.excluded, "the filter": self.filtered}
        left_out = ", ".join(f"{count} left out by {by}" for by, count in counts.items() if count)
        what = "the sweep has no runs" + (f" ({left_out})" if left_out else "")
        return ("filter",) if self.filtered else ("exclude",), what + self.values_seen()

    def values_seen(self) -> str:
        """Return text that lists up to 20 values of each parameter in the filter."""
        compared = self.filter.names if self.filter else set()
        seen: dict[str, dict[Any, None]] = {}
        for scope in self.scopes:
            for part in itertools.chain(*scope.groups):
                for name in compared & part.keys():
                    seen.setdefault(name, {})[part[name]] = None
        texts = (f"; {name} has the values {list(seen[name])[:20]}" for name in sorted(seen))
        return "".join(texts)


Group = list[dict[str, Any]]  # alternative settings of one or more parameters


@dataclass(frozen=True)
class _Scope:
    """A case with all that it inherits, or the top level of a sweep without cases."""

    path: DataPath  # in the file
    benchmark: Benchmark
    groups: list[Group]  # their Cartesian product gives the runs; the last group varies fastest
    timeout_s: float
    resources: dict[str, Any]  # also launch settings, by their names in `Shape`
    own: Collection[str] = ()  # which of the resources are those of the case


def _scopes(sweep: Sweep, benchmarks: Benchmarks) -> Iterator[_Scope]:
    resources = _resources(sweep)
    if not sweep.cases:
        groups = _groups(sweep.fixed, sweep.grid, sweep.zip)
        yield _Scope((), benchmarks.own, groups, sweep.timeout_s, resources)
    for i, case in enumerate(sweep.cases):
        benchmark = benchmarks.of(case.benchmark)
        theirs = set(benchmark.fields) - {*case.fixed, *case.grid, *case.zip}
        # A case does not inherit a parameter that it sets. If the sweep and the case both set a
        # parameter in grid, its position in grid is kept, and so is the order of the runs.
        fixed = {k: v for k, v in sweep.fixed.items() if k in theirs} | case.fixed
        grid = {k: v for k, v in sweep.grid.items() if k in theirs | case.grid.keys()} | case.grid
        zipped = {k: v for k, v in sweep.zip.items() if k in theirs}
        groups = _groups(fixed, grid, zipped, case.zip)
        timeout_s = case.timeout_s or sweep.timeout_s
        own = _resources(case, exclude_unset=True)
        yield _Scope(("cases", i), benchmark, groups, timeout_s, resources | own, own.keys())


def _resources(of: Sweep | Case, exclude_unset: bool = False) -> dict[str, Any]:
    dumped = of.resources.model_dump(exclude_unset=exclude_unset)
    return dumped | of.launch.model_dump(exclude_unset=exclude_unset)


def _groups(
    fixed: dict[str, Any], grid: dict[str, list[Any]], *zips: dict[str, list[Any]]
) -> list[Group]:
    """Return the only setting in `fixed`, each of the `zips`, and each parameter in `grid`."""
    rows = [[dict(zip(z, row, strict=True)) for row in zip(*z.values(), strict=True)] for z in zips]
    alone = [[{name: value} for value in values] for name, values in grid.items()]
    return [[fixed], *filter(None, rows), *alone]
