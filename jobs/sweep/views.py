"""The keys `tables` and `plots` of a sweep file, called views, and the names that tables show."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from jobs.errors import TableError, nearest
from jobs.published.figures import Published, published_columns, published_problems
from jobs.run import Run
from jobs.sweep.benchmarks import RESERVED, Benchmark, short_name
from jobs.sweep.conditions import Condition, ConditionError, Names
from jobs.sweep.strict_yaml import Faults, fault
from jobs.sweep.value_types import STRICT, Name, Positive, Scalar

# Names of the values that a table can show. `jobs.frame.metrics` computes the values.
FACT = "fact."  # prefix for a fact, which is a result that the benchmark returned
PREDICTED = "predicted."  # prefix for a value that the benchmark's function `predict` returns
NAMED = (FACT, PREDICTED)
VALUES = (
    "time", "tflops", "bandwidth", "bus_bandwidth", "mfu", "tokens_per_second", "peak_memory",
    "compiling_seconds",
)  # fmt: skip
TIME_UNITS = ("us", "ms", "s")
BYTE_UNITS = ("MB", "MiB", "GB", "GiB")
STATISTICS = ("median", "mean", "min", "max", "std", "p10", "p90", "mean_std")
PSEUDO = RESERVED  # can be used like parameters in rows and columns of a table
DEVICE = "device"  # allowed in `where`, in addition to the parameters
# Keys of a table that are not allowed together with `list`.
_NOT_OF_LISTS = {"value", "columns", "baseline", "phase", "statistic", "direction"}

# Suffixes of names of facts, with their units. Any part of a dotted name may have one, as in
# host_ms.forward.
SUFFIXES = {"_ms": "ms", "_seconds": "s", "_bytes": "bytes"}


def measured_in(value: str) -> str:
    """Return the unit that the name of a value contains: "ms", "s", "bytes" or an empty string."""
    parts = reversed(value.split("."))
    found = (unit for part in parts for end, unit in SUFFIXES.items() if part.endswith(end))
    return next(found, "")


def units_of_measure(unit: str) -> tuple[str, ...]:
    """Return the units to which a table can convert a quantity that was measured in `unit`."""
    if unit in ("ms", "s"):
        return TIME_UNITS
    return BYTE_UNITS if unit == "bytes" else ()


def units_of(value: str) -> tuple[str, ...]:
    """Return the units to which a table can convert a value, such as `time` or `fact.host_ms`."""
    if value.startswith(NAMED):
        return units_of_measure(measured_in(value))
    return {"time": TIME_UNITS, "peak_memory": BYTE_UNITS}.get(value, ())


def unknown_value(name: str) -> str | None:
    """Return an error message if tables cannot show a value of this name, else None."""
    if name in VALUES or (name.startswith(NAMED) and name not in NAMED):
        return None
    hint = nearest(name, [*VALUES, *(f"{prefix}<name>" for prefix in NAMED)])
    return f"{name!r} is not known{hint}"


def names_in_title(title: str) -> list[str]:
    """Return the names in braces in the title of a table or plot, such as `batch_size`."""
    return list(dict.fromkeys(re.findall(r"\{(.*?)\}", title)))


class _View(BaseModel):
    """The keys of a sweep file that tables and plots have in common."""

    model_config = STRICT

    name: Name
    benchmark: str | None = None  # benchmark whose runs are shown; default: the sweep's
    title: str | None = None  # see `names_in_title`
    phase: str | list[str] | None = None  # default: all phases that were measured
    statistic: Literal[STATISTICS] = "median"  # type: ignore[valid-type]
    # Values that cannot be converted to this unit keep their default unit.
    unit: Literal[*TIME_UNITS, *BYTE_UNITS] | None = None  # type: ignore[valid-type]
    # Which values are better. Default: depends on the value.
    direction: Literal["lower", "higher"] | None = None
    where: str | None = None
    value: str | Annotated[list[str], Field(min_length=1)] = "time"

    @property
    def phases(self) -> list[str]:
        """The phases that are named. Empty: all that were measured."""
        return [self.phase] if isinstance(self.phase, str) else list(self.phase or [])

    @property
    def values(self) -> list[str]:
        return [self.value] if isinstance(self.value, str) else self.value

    def faults(self, own: Benchmark, used: Iterable[Benchmark]) -> Faults:
        """Yield the errors in a view of a sweep with the benchmark `own`, whose runs use `used`."""
        by_name = {benchmark.name: benchmark for benchmark in used}
        name = own.name if self.benchmark is None else short_name(self.benchmark)
        if name not in by_name:
            what = f"benchmark: no run of this sweep has benchmark {name!r}"
            yield fault(what + nearest(name, list(by_name)), "benchmark")
            return
        benchmark = by_name[name]
        yield from self._own_faults(benchmark)
        for name in names_in_title(self.title or ""):
            if name not in benchmark.fields:
                hint = nearest(name, benchmark.fields)
                yield fault(f"title: no parameter {name!r}{hint}", "title")
        if self.where is not None:
            try:
                check = partial(_wrong, benchmark)
                Condition(self.where, Names(benchmark.fields, [DEVICE], check))
            except ConditionError as error:
                yield fault(str(error), "where")

    def _own_faults(self, benchmark: Benchmark) -> Faults:
        """Yield the errors in the keys that only tables, or only plots, have."""
        raise NotImplementedError

    def _value_faults(self, benchmark: Benchmark) -> Faults:
        for i, phase in enumerate(self.phases):
            if phase in self.phases[:i]:  # its samples would be counted twice
                yield fault(f"phase: {phase!r} is listed twice", "phase", i)
        for i, value in enumerate(self.values):
            if value in self.values[:i]:
                yield fault(f"value: {value!r} is listed twice", "value", i)
            if wrong := _not_shown(benchmark, value):
                yield fault(f"value: {wrong}", "value", i)
                if unknown_value(value):
                    return
        can = {unit: None for value in self.values for unit in units_of(value)}
        if self.unit is not None and self.unit not in can:
            given = " and ".join(self.values)
            valid = ", ".join(can) or "none; facts need a suffix _ms, _seconds or _bytes"
            yield fault(f"unit: {given} cannot be shown in {self.unit} (valid: {valid})", "unit")

    def _dimension_faults(
        self, benchmark: Benchmark, *keys: str, without: tuple[str, ...] = ()
    ) -> Faults:
        """Yield the errors in the keys that list parameters, such as `rows` and `columns`."""
        seen: dict[str, str] = {}
        known = [n for n in (*benchmark.fields, *PSEUDO) if n not in without]
        for key in keys:
            given = getattr(self, key)
            for i, name in enumerate([given] if isinstance(given, str) else given):
                if name not in known:
                    yield fault(f"{key}: no parameter {name!r}{nearest(name, known)}", key, i)
                elif name in seen:
                    yield fault(f"{key}: {name!r} is already in {seen[name]}", key, i)
                seen[name] = key


def _not_shown(benchmark: Benchmark, value: str) -> str | None:
    """Return an error message if tables cannot show a value of a benchmark, else None."""
    if value.startswith(PREDICTED) and value != PREDICTED and not benchmark.predicts:
        return f"benchmark {benchmark.name!r} has no function predict(params)"
    return unknown_value(value)


def _wrong(benchmark: Benchmark, name: str, value: Any) -> str | None:
    """Return an error message if a name in the condition of a view can never equal a value."""
    if name in benchmark.fields:
        return benchmark.never_equals(name, value)
    what = f"{name.removeprefix('run.')}: got {value!r}, expected text; write it in quotes"
    return None if isinstance(value, str) else what


class Table(_View):
    """A table of results, or with the key `list` of the items of a list that runs returned."""

    rows: list[str] = []
    columns: list[str] = []
    baseline: dict[str, Scalar] | None = None  # speedups are relative to this column
    # The fact that the key `list`, which is a builtin, names
    list_fact: Annotated[str, Field(pattern=r"^[^.]+(\.[^.]+)*$")] | None = Field(
        None, alias="list"
    )
    limit: Positive | None = None  # maximum number of rows per run, with `list`
    published: list[Published] = []

    def _own_faults(self, benchmark: Benchmark) -> Faults:
        for i, source in enumerate(self.published):
            for name in source.on:
                if name not in self.rows:
                    rows = ", ".join(self.rows) or "none"
                    what = f"on: {name!r} is not one of the table's rows (rows: {rows})"
                    yield fault(what, "published", i, "on", name, at_key=True)
            for place, what in published_problems(source):
                yield fault(what, "published", i, *place)
        if self.list_fact is not None:
            for key in sorted(_NOT_OF_LISTS & self.model_fields_set):
                yield fault(f"{key}: not allowed together with the key 'list'", key, at_key=True)
            yield from self._dimension_faults(benchmark, "rows", without=("phase", "value"))
            return
        if self.limit is not None:
            yield fault("limit: only allowed together with the key 'list'", "limit", at_key=True)
        yield from self._value_faults(benchmark)
        yield from self._dimension_faults(benchmark, "rows", "columns")
        if self.baseline == {}:
            yield fault("baseline must name a column and its value, got {}", "baseline")
        for name, value in (self.baseline or {}).items():
            if name not in self.columns:
                columns = ", ".join(self.columns) or "none"
                what = f"baseline: {name!r} is not one of the table's columns (columns: {columns})"
                yield fault(what, "baseline", name, at_key=True)
            elif name == "value":
                what = "'value' is not allowed; columns of 'value' show different quantities"
                yield fault(f"baseline: {what}", "baseline", name, at_key=True)
            else:
                is_checked = name in benchmark.fields or name == DEVICE
                if is_checked and (wrong := _wrong(benchmark, name, value)):
                    yield fault(f"baseline: {wrong}", "baseline", name)


class Plot(_View):
    """A plot of results. Its points are the cells of a table."""

    value: str = "time"
    x: str
    against: str | None = None  # metric on the x axis, with points that x labels
    series: list[str] = []
    facet: list[str] = []

    @property
    def rows(self) -> list[str]:
        """The rows of the table: one for each point of a line, the parameter x last."""
        return [*self.facet, self.x]

    @property
    def columns(self) -> list[str]:
        """The columns of the table: one for each line of a panel."""
        return self.series

    def _own_faults(self, benchmark: Benchmark) -> Faults:
        yield from self._value_faults(benchmark)
        yield from self._dimension_faults(benchmark, "x", "series", "facet")
        if self.against is None:
            return
        if wrong := _not_shown(benchmark, self.against):
            yield fault(f"against: {wrong}", "against")
        elif not isinstance(self.phase, str):
            yield fault("against: name one phase, such as phase: forward", "against")


def run_faults(view: Table | Plot, runs: Sequence[Run]) -> Faults:
    """Yield the errors in a table or plot that only the runs of its benchmark show.

    `where` must be true or false for every run, unless it contains a value of records. A cell for
    published figures must not match several figures.
    """
    if not runs:  # the filter removed all runs of this benchmark
        return
    chosen = list(runs)
    if view.where is not None:
        params = {name for run in runs for name in run.params}
        condition = Condition(view.where, Names(params, [DEVICE]))
        if f"run.{DEVICE}" in condition.names:  # needs records, which the runs may not have yet
            return
        try:
            chosen = [run for run in runs if condition(run.params)]
        except ConditionError as error:
            yield fault(str(error), "where")
    if not isinstance(view, Table):
        return
    for i, source in enumerate(view.published if chosen else ()):
        dims = [name for name in view.rows if name in chosen[0].params]
        if not source.on.keys() <= set(dims):  # needs records, such as for the device
            continue
        keys = dict.fromkeys(tuple(run.params[name] for name in dims) for run in chosen)
        try:
            published_columns(source, dims, list(keys))
        except TableError as error:
            yield fault(str(error), "published", i)
