"""Expands a sweep into its runs. A run is one combination of a benchmark and its parameters.

A sweep has one or more scopes: its cases, or the sweep itself if it has no cases. The keys `grid`
and `zip` of a scope list values of parameters. The runs of a scope are the Cartesian product of the
parameters in `grid` and the combinations in `zip`. The runs of a sweep are the union of the runs of
its scopes. The id of a run stays the same if the sweep is expanded again.
"""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from jobs.block import Block
from jobs.errors import ENOUGH, InputError, Position, Problem
from jobs.run import Run, Shape
from jobs.run_id import run_id
from jobs.sweep.benchmark_conditions import BENCHMARK, comparison, exclusions
from jobs.sweep.benchmarks import Benchmark, Benchmarks
from jobs.sweep.check_slurm import LEAST_MEM_GB
from jobs.sweep.check_views import view_problems
from jobs.sweep.conditions import Condition, ConditionError
from jobs.sweep.form_blocks import form_blocks
from jobs.sweep.load import LoadedSweep
from jobs.sweep.schema import AXES, GPU_TYPE, Case, Plot, Shuffle, Sweep, Table
from jobs.sweep.strict_yaml import DataPath

MAX_RUNS = 1_000_000  # a larger sweep is probably a typo


@dataclass(frozen=True)
class Expansion:
    """The runs of a sweep in execution order, and how many combinations were left out.

    A combination gives each parameter of a benchmark one value.
    """

    runs: list[Run]
    excluded: int  # number of combinations that match an entry of `exclude`
    filtered: int  # number of combinations that the filter leaves out
    duplicates: int  # number of combinations that repeat an earlier run
    warnings: list[Problem] = field(default_factory=list, compare=False)
    blocks: list[Block] = field(default_factory=list)  # groups of runs that are measured in turn


def expand(loaded: LoadedSweep) -> Expansion:
    """Return the runs of a sweep.

    Raises:
        InputError: if the sweep has no runs or more than MAX_RUNS (1,000,000) runs. Also if a
            benchmark rejects a combination of parameters, or if two cases give the same run
            different resources. Also if the value of a parameter is not valid in `resources` or
            `launch` (for example, `gpus_per_node: $gpus` requires an integer). Also if a condition,
            table or plot is not valid for the runs.
    """
    return _Expander(loaded).expansion()


class _Expander:
    """Expands one sweep into its runs, and collects the errors."""

    def __init__(self, loaded: LoadedSweep):
        self.sweep, self.benchmarks = loaded.sweep, loaded.benchmarks
        self.document = loaded.document
        self.exclusions = exclusions(self.sweep, self.benchmarks)
        self.has_excluded = [False] * len(self.exclusions)  # True for entries that match a run
        text = self.sweep.filter
        self.filters = comparison(text, self.benchmarks) if text else None
        self.runs: dict[str, Run] = {}
        self.origin: dict[str, DataPath] = {}  # path of the scope of each run, by run id
        self.excluded = self.filtered = self.duplicates = 0
        # For each problem, the parameter combinations that have it, as text.
        self.problems: dict[Problem, list[Any]] = {}

    def expansion(self) -> Expansion:
        scopes = list(_scopes(self.sweep, self.benchmarks))
        points = sum(math.prod(len(group) for group in groups) for *_, groups in scopes)
        paired = self.sweep.blocks
        times = self.sweep.repeats if paired is None else paired.most_rounds
        if points * times > MAX_RUNS:
            what = (
                f"a sweep must have at most {MAX_RUNS} runs, got {points} combinations x "
                f"{times} {'repeats' if paired is None else 'rounds'}; make the lists shorter"
            )
            raise InputError([Problem(self.document.at(()), what)])
        for path, case, fixed, groups in scopes:
            for combination in itertools.product(*groups):
                point = dict(fixed)
                for part in combination:
                    point.update(part)
                self.add(path, case, point)
                if len(self.problems) >= ENOUGH:
                    raise self.error()
        self.check_views()
        if not self.runs and not self.problems:
            self.problems[self.nothing_left()] = []
        if self.problems:
            raise self.error()
        ordered = list(self.runs.values())
        if isinstance(self.sweep.order, Shuffle):
            random.Random(self.sweep.order.shuffle).shuffle(ordered)
        wrong: list[Problem] = []
        formed = form_blocks(ordered, self.sweep, self.benchmarks, self.document, wrong)
        if wrong:
            raise InputError(wrong)
        warnings = [*self.without_effect(), *self.all_cases_replace()]
        return Expansion(ordered, self.excluded, self.filtered, self.duplicates, warnings, formed)

    def error(self) -> InputError:
        return InputError([_with_examples(*item) for item in self.problems.items()])

    def add(self, path: DataPath, case: Case | None, point: dict[str, Any]) -> None:
        benchmark = self.benchmarks.of(case.benchmark if case else None)
        try:
            params = benchmark.params.model_validate(point).model_dump(mode="json")
        except ValidationError as error:
            # A combination that the benchmark rejects is no error if exclude or the filter removes
            # the combination.
            complete = benchmark.json_defaults | point
            if len(complete) < len(benchmark.fields) or not self.count_if_left_out(
                benchmark, complete
            ):
                self.note_refusal(error, point, path)
            return
        if self.count_if_left_out(benchmark, params):
            return
        identity = run_id(benchmark.name, benchmark.version, params, benchmark.json_defaults)
        shape = self.shape(case, params, path)
        if identity in self.runs:
            self.duplicates += 1
            if shape != self.runs[identity].shape:
                first = ".".join(map(str, self.origin[identity]))
                what = (
                    f"the same run is in {first} with other resources or launch settings; "
                    "remove the run from one of the two"
                )
                self.add_problem(self.document.at(path), what, point)
            return
        timeout_s = case.timeout_s if case and case.timeout_s else self.sweep.timeout_s
        self.runs[identity] = Run(
            identity,
            benchmark.name,
            benchmark.version,
            params,
            shape,
            timeout_s,
            benchmark.references(params),
        )
        self.origin[identity] = path

    def add_problem(self, where: Position, what: str, point: dict[str, Any]) -> None:
        varied = {k: v for k, v in point.items() if k not in self.sweep.fixed}
        named = " ".join(f"{name}={value}" for name, value in (varied or point).items())
        self.problems.setdefault(Problem(where, what), []).append(named)

    def count_if_left_out(self, benchmark: Benchmark, params: dict[str, Any]) -> bool:
        params = {BENCHMARK: benchmark.name} | params  # a parameter of this name takes precedence
        excluded = False
        for i, conditions in enumerate(self.exclusions):
            condition = conditions.get(benchmark.name)
            if condition is None:
                continue
            if not excluded:
                excluded = self.holds(condition, params, ("exclude", i))
                self.has_excluded[i] |= excluded
            elif not self.has_excluded[i]:  # already excluded; check only for the warning
                with suppress(ConditionError):
                    self.has_excluded[i] = condition(params)
        if excluded:
            self.excluded += 1
            return True
        if self.filters is None:
            return False
        if not self.holds(self.filters[benchmark.name], params, ("filter",)):
            self.filtered += 1
            return True
        return False

    def holds(self, condition: Condition, params: dict[str, Any], path: DataPath) -> bool:
        try:
            return condition(params)
        except ConditionError as error:
            self.problems[Problem(self.document.at(path), str(error))] = []
            return False

    def check_views(self) -> None:
        """Check the tables and plots of the sweep against its runs, and collect the errors."""
        views: dict[str, Sequence[Table | Plot]] = {
            "tables": self.sweep.tables,
            "plots": self.sweep.plots,
        }
        for key, listed in views.items():
            for i, view in enumerate(listed):
                name = self.benchmarks.of(view.benchmark).name
                runs = [run for run in self.runs.values() if run.benchmark == name]
                for path, what in view_problems(view, runs):
                    self.problems[Problem(self.document.at((key, i, *path)), what)] = []

    def without_effect(self) -> Iterator[Problem]:
        """Yield a warning for each entry of `exclude` that matches no run.

        An override is a setting `key=value` on the command line. If an override sets a parameter
        that occurs in the entry, there is no warning, because the override may have removed the
        excluded values.
        """
        overridden = {
            path[1]
            for path, position in self.document.positions.items()
            if len(path) == 2 and path[0] in AXES and not position.line
        }
        for i, held in enumerate(self.has_excluded):
            named = {name for condition in self.exclusions[i].values() for name in condition.named}
            if not held and not named & overridden:
                yield Problem(
                    self.document.at(("exclude", i)),
                    "exclude: no run matches this entry, so it has no effect",
                )

    def all_cases_replace(self) -> Iterator[Problem]:
        """Yield a warning for each parameter at the top level of the sweep file that no case uses.

        A case that sets the parameter itself does not use the values at the top level. Cases whose
        benchmark does not have the parameter are ignored.
        """
        for axis in AXES:
            for name in getattr(self.sweep, axis):
                having = [
                    {*case.fixed, *case.grid, *case.zip}
                    for case in self.sweep.cases
                    if name in self.benchmarks.of(case.benchmark).fields
                ]
                if having and all(name in case for case in having):
                    where = self.document.at_key((axis, name))
                    yield Problem(
                        where, f"{axis}: every case replaces {name!r}, so this has no effect"
                    )

    def note_refusal(self, error: ValidationError, point: dict[str, Any], scope: DataPath) -> None:
        for item in error.errors():
            name = item["loc"][0] if item["loc"] else None
            message = item["msg"].removeprefix("Value error, ")
            if item["type"] == "missing":
                what = f"parameter {name!r} is required by the benchmark; set it in fixed or grid"
                self.problems[Problem(self.document.at(scope), what)] = []
            elif name is not None:
                value = point.get(str(name))
                where = self.document.at(self.where_given(scope, str(name), value))
                self.problems[Problem(where, f"{name} cannot be {value!r}: {message}")] = []
            else:
                grid = (*scope, "grid")
                where = self.document.at(grid if grid in self.document.positions else scope)
                self.add_problem(where, message, point)

    def where_given(self, scope: DataPath, name: str, value: Any) -> DataPath:
        """Return the path of a parameter's value in the sweep file, for an error message.

        A value in the given scope (a case or the top level) is preferred to a value at the top
        level. If there is no value, return the path of the scope. In a list of values, return the
        path of the given value.
        """
        for prefix in (scope, ()):
            data = self.document.data["cases"][prefix[1]] if prefix else self.document.data
            for axis in AXES:
                given = (data.get(axis) or {}).get(name)
                if given is not None:
                    path = (*prefix, axis, name)
                    return (*path, given.index(value)) if isinstance(given, list) else path
        return scope

    def shape(self, case: Case | None, params: dict[str, Any], path: DataPath) -> Shape:
        sweep = self.sweep
        wanted: dict[str, Any] = {**sweep.resources.model_dump(), **sweep.launch.model_dump()}
        if case is not None:
            wanted |= case.resources.model_dump(exclude_unset=True)
            wanted |= case.launch.model_dump(exclude_unset=True)
        wanted.pop("tasks_per_node", None)
        for key, value in wanted.items():
            if not isinstance(value, str) or not value.startswith("$"):
                continue
            given = params[value[1:]]
            wrong = _wanted_instead(key, given)
            if wrong:
                section = "launch" if key == "nproc_per_node" else "resources"
                here = (*path, section, key)
                where = here if here in self.document.positions else (section, key)
                what = f"{key} must be {wrong}, got {value} = {given!r}"
                self.problems[Problem(self.document.at(where), what)] = []
                given = None
            wanted[key] = given
        if not wanted["gpus_per_node"]:
            wanted["gpu_type"] = None
        return Shape(**wanted)

    def nothing_left(self) -> Problem:
        counts = ((self.excluded, "left out by exclude"), (self.filtered, "left out by the filter"))
        left_out = ", ".join(f"{count} {how}" for count, how in counts if count)
        what = "the sweep has no runs" + (f" ({left_out})" if left_out else "")
        where = self.document.at(("filter",) if self.filtered else ("exclude",))
        return Problem(where, what + self.values_seen())

    def values_seen(self) -> str:
        """Return text for an error message that lists values of the parameters in the filter.

        For each parameter that the filter contains, the text lists up to 20 values that it has in
        the sweep file.
        """
        seen: dict[str, dict[Any, None]] = {}
        for _, _, fixed, groups in _scopes(self.sweep, self.benchmarks):
            parts = [[fixed], *groups]
            for part in itertools.chain.from_iterable(parts):
                for name, value in part.items():
                    seen.setdefault(name, {})[value] = None
        filters = (self.filters or {}).values()
        compared = {name for condition in filters for name in condition.named}
        return "".join(
            f"; {name} has the values {list(values)[:20]}"
            for name, values in seen.items()
            if name in compared
        )


def _with_examples(problem: Problem, points: list[str]) -> Problem:
    if not points:
        return problem
    more = f" and {len(points) - 1} more" if len(points) > 1 else ""
    return Problem(problem.position, f"{problem.message} ({points[0]}{more})")


def _wanted_instead(key: str, given: Any) -> str | None:
    """Return text that describes the valid values of a key, or None if the given value is valid.

    The key is one of `resources` or `launch`, such as `nodes`.
    """
    if key == "gpu_type":
        valid = isinstance(given, str) and re.fullmatch(GPU_TYPE, given)
        return None if valid else f"a name that matches the pattern '{GPU_TYPE}'"
    number = not isinstance(given, bool) and isinstance(given, (int, float))
    if key == "mem_gb":
        return None if number and given >= LEAST_MEM_GB else f"a number of at least {LEAST_MEM_GB}"
    least = 0 if key == "gpus_per_node" else 1
    whole = number and isinstance(given, int) and given >= least
    return None if whole else f"an integer of at least {least}"


Group = list[dict[str, Any]]  # alternative settings of one or more parameters


def _scopes(
    sweep: Sweep, benchmarks: Benchmarks
) -> Iterator[tuple[DataPath, Case | None, dict[str, Any], list[Group]]]:
    """Yield the scopes of a sweep. The Cartesian product of a scope's groups gives its runs.

    A scope is a case, or the whole sweep if the sweep has no cases. A group is a list of
    alternatives, such as `[{"seq_len": 128}, {"seq_len": 256}]`.

    Yields:
        The path of the scope in the sweep file, the case or None, the parameters with one fixed
        value, and the groups.
    """
    if not sweep.cases:
        yield (), None, sweep.fixed, _groups(sweep.grid, sweep.zip)
    for i, case in enumerate(sweep.cases):
        known = set(benchmarks.of(case.benchmark).fields)
        theirs = known - {*case.fixed, *case.grid, *case.zip}
        # A case does not inherit a parameter that it sets. If the sweep and the case both set a
        # parameter in grid, its position in grid is kept, and so is the order of the runs.
        fixed = {k: v for k, v in sweep.fixed.items() if k in theirs} | case.fixed
        grid = {
            k: case.grid.get(k, v) for k, v in sweep.grid.items() if k in case.grid or k in theirs
        }
        zipped = {k: v for k, v in sweep.zip.items() if k in theirs}
        yield ("cases", i), case, fixed, _groups(grid | case.grid, zipped, case.zip)


def _groups(grid: dict[str, list[Any]], *zips: dict[str, list[Any]]) -> list[Group]:
    """Return groups of settings. Their Cartesian product gives the combinations of parameters.

    A group is a list of alternatives, such as `[{"seq_len": 128}, {"seq_len": 256}]`. The first
    groups come from `zips`: one group per mapping that is not empty. The other groups come from
    `grid`: one group per parameter. In the product, the last group varies fastest. The lists of a
    mapping in `zips` have equal lengths, and their i-th values form one alternative.
    """
    groups = [
        [dict(zip(z, row, strict=True)) for row in zip(*z.values(), strict=True)] for z in zips if z
    ]
    return groups + [[{name: value} for value in values] for name, values in grid.items()]
