"""The keys `tables` and `plots` of a sweep file, and the names that tables show.

A view is a table or plot. It is checked against the parameters of the benchmark whose runs it
shows, if the validation has a `Context`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, ValidationInfo, model_validator
from pydantic_core import InitErrorDetails

from jobs.errors import TableError, nearest
from jobs.published.columns import published_columns
from jobs.published.figures import Published, published_problems
from jobs.run import Run
from jobs.sweep.benchmarks import RESERVED, Benchmark, short_name
from jobs.sweep.conditions import Check, Condition, ConditionError, Names
from jobs.sweep.context import STRICT, Context, Name, Positive, Scalar
from jobs.sweep.messages import fault, raise_faults
from jobs.sweep.strict_yaml import DataPath

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
# Names of values of a record. They can be used like parameters in rows, columns and `where`. If a
# benchmark has a parameter with such a name, the name stands for the parameter.
RECORDED = ("commit", "host", "gpu")
FILTERS = ("device", *RECORDED)  # allowed in `where`, in addition to the parameters
# Forms of the values that tables show, as regular expressions, each with an example. Without this
# check, a full hash would match no result.
_FORMS = {
    "commit": (r".{1,7}(-dirty\??(\+[0-9a-f]{4})?)?|no record", "'4bb999b' or '4bb999b-dirty'"),
    "gpu": (
        r"([0-9a-f]{8}|unknown)(\+([0-9a-f]{8}|unknown))*|no record|–",
        "'6fb37310', the first 8 digits of the UUID",
    ),
}
# Keys of a table that are not allowed together with `list`.
_NOT_OF_LISTS = {"value", "columns", "baseline", "phase", "statistic", "direction"}


# A suffix of a fact's name gives the unit of the fact. In a dotted name, any part may have the
# suffix: host_ms.forward is in milliseconds.
SUFFIXES = {"_ms": "ms", "_seconds": "s", "_bytes": "bytes"}


def measured_in(value: str) -> str:
    """Return the unit that the name of a value contains: "ms", "s", "bytes" or an empty string."""
    for part in reversed(value.split(".")):
        for suffix, unit in SUFFIXES.items():
            if part.endswith(suffix):
                return unit
    return ""


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


def names_in_where(parameters: Collection[str], check: Check | None = None) -> Names:
    """Return the names that the condition `where` of a view may contain."""
    recorded = [name for name in FILTERS if name not in parameters]
    return Names({"": parameters}, recorded, check)


def _recorded_problem(name: str, value: Any) -> str | None:
    """Return an error message if a name in `FILTERS` can never equal a value, else None."""
    if not isinstance(value, str):
        return f"{name}: got {value!r}, expected text; write it in quotes"
    form, example = _FORMS.get(name, ("", ""))
    if form and not re.fullmatch(form, value):
        return f"{name}: got {value!r}, expected a value as in tables, such as {example}"
    return None


Faults = Iterator[InitErrorDetails]


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

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo[Context | None]) -> Self:
        if info.context is not None:
            raise_faults(self._faults(info.context))
        return self

    def _faults(self, context: Context) -> Faults:
        used = {benchmark.name: benchmark for benchmark in context.used()}
        own = context.benchmarks.own.name
        name = own if self.benchmark is None else short_name(self.benchmark)
        if name not in used:
            what = f"benchmark: no run of this sweep has benchmark {name!r}"
            yield fault(what + nearest(name, list(used)), "benchmark")
            return
        benchmark = used[name]
        yield from self._own_faults(benchmark)
        for name in names_in_title(self.title or ""):
            if name not in benchmark.fields:
                hint = nearest(name, benchmark.fields)
                yield fault(f"title: no parameter {name!r}{hint}", "title")
        if self.where is not None:
            try:
                Condition(self.where, names_in_where(benchmark.fields, _check(benchmark)))
            except ConditionError as error:
                yield fault(str(error), "where")

    def _own_faults(self, benchmark: Benchmark) -> Faults:
        """Yield the errors in the keys that only tables, or only plots, have."""
        raise NotImplementedError

    def _value_faults(self, benchmark: Benchmark) -> Faults:
        phases = [self.phase] if isinstance(self.phase, str) else self.phase or []
        for i, phase in enumerate(phases):
            if phase in phases[:i]:  # its samples would be counted twice
                yield fault(f"phase: {phase!r} is listed twice", "phase", i)
        values = [self.value] if isinstance(self.value, str) else self.value
        for i, value in enumerate(values):
            if value in values[:i]:
                yield fault(f"value: {value!r} is listed twice", "value", i)
            unknown = unknown_value(value)
            if unknown:
                yield fault(f"value: {unknown}", "value", i)
                return
            if value.startswith(PREDICTED) and not benchmark.predicts:
                what = f"value: benchmark {benchmark.name!r} has no function predict(params)"
                yield fault(what, "value", i)
        can = {unit: None for value in values for unit in units_of(value)}
        if self.unit is not None and self.unit not in can:
            given = " and ".join(values)
            valid = ", ".join(can) or "none; remove this key"
            what = f"unit: {given} cannot be shown in {self.unit} (valid: {valid})"
            if any(value.startswith(NAMED) for value in values):
                what += "; only names with the suffix _ms, _seconds or _bytes have a unit"
            yield fault(what, "unit")

    def _dimension_faults(
        self, benchmark: Benchmark, *keys: str, without: tuple[str, ...] = ()
    ) -> Faults:
        """Yield the errors in the keys that list parameters, such as `rows` and `columns`.

        Each name must be a parameter of the benchmark, or in `PSEUDO` or `RECORDED` but not in
        `without`. A name may occur only once.
        """
        seen: dict[str, str] = {}
        known = [n for n in (*benchmark.fields, *PSEUDO, *RECORDED) if n not in without]
        for key in keys:
            given = getattr(self, key)
            for i, name in enumerate([given] if isinstance(given, str) else given):
                if name not in known:
                    yield fault(f"{key}: no parameter {name!r}{nearest(name, known)}", key, i)
                elif name in seen:
                    yield fault(f"{key}: {name!r} is already in {seen[name]}", key, i)
                seen[name] = key


def _check(benchmark: Benchmark) -> Check:
    """Return the check of plain values in the condition of a view."""

    def check(name: str, value: Any) -> str | None:
        if name in benchmark.fields:
            return benchmark.never_equals(name, value)
        return _recorded_problem(name.removeprefix("run."), value)

    return check


class Table(_View):
    """A table that shows results of runs.

    If the key `list` is set, the table shows a list that the benchmark returned. Each item of the
    list then has one row.
    """

    rows: list[str] = []
    columns: list[str] = []
    baseline: dict[str, Scalar] | None = None  # speedups are relative to this column
    # Name of a fact that is a list. The key in the file is `list`. The field has another name,
    # because `list` is a builtin.
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
            elif name in benchmark.fields:
                wrong = benchmark.wrong_value(name, value)
                if wrong:
                    yield fault(wrong, "baseline", name)
            elif name in FILTERS:
                wrong = _recorded_problem(name, value)
                if wrong:
                    yield fault(f"baseline: {wrong}", "baseline", name)


class Plot(_View):
    value: str = "time"
    x: str
    series: list[str] = []
    facet: list[str] = []

    def _own_faults(self, benchmark: Benchmark) -> Faults:
        yield from self._value_faults(benchmark)
        yield from self._dimension_faults(benchmark, "x", "series", "facet")


def view_problems(view: Table | Plot, runs: Sequence[Run]) -> Iterator[tuple[DataPath, str]]:
    """Yield the path and message of each error of a table or plot on runs of its benchmark.

    It must be possible to evaluate the condition `where` for every run, unless it contains a value
    of records, such as the commit. A cell for published figures must not match several figures.
    """
    if not runs:  # the filter removed all runs of this benchmark
        return
    chosen = list(runs)
    if view.where is not None:
        params = {name for run in runs for name in run.params}
        condition = Condition(view.where, names_in_where(params))
        if condition.recorded:  # needs records, which the runs may not have yet
            return
        try:
            chosen = [run for run in runs if condition(run.params)]
        except ConditionError as error:
            yield ("where",), str(error)
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
            yield ("published", i), str(error)
