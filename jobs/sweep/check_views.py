"""Checks the tables and plots of a sweep before submission.

`check_views` checks them against the parameters of the benchmark whose runs they show. After the
sweep is expanded into runs, `view_problems` checks them against these runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from jobs.errors import Problem, TableError, nearest
from jobs.published.columns import published_columns
from jobs.published.figures import published_problems
from jobs.run import Run
from jobs.sweep.benchmarks import Benchmark, Benchmarks, short_name
from jobs.sweep.check_schema import (
    NOT_OF_LISTS,
    literal_check,
    run_scopes,
    valid_entries,
    value_check,
)
from jobs.sweep.conditions import Condition, ConditionError
from jobs.sweep.schema import (
    FILTERS,
    NAMED,
    PREDICTED,
    PSEUDO,
    RECORDED,
    Plot,
    Table,
    names_in_title,
    units_of,
    unknown_value,
)
from jobs.sweep.strict_yaml import DataPath, Document

# Forms of the values that tables show, as regular expressions, each with an example. Without this
# check, a full hash would match no result.
_FORMS = {
    "commit": (r".{1,7}(-dirty\??(\+[0-9a-f]{4})?)?|no record", "'4bb999b' or '4bb999b-dirty'"),
    "gpu": (
        r"([0-9a-f]{8}|unknown)(\+([0-9a-f]{8}|unknown))*|no record|–",
        "'6fb37310', the first 8 digits of the UUID",
    ),
}


def view_problems(view: Table | Plot, runs: Sequence[Run]) -> Iterator[tuple[DataPath, str]]:
    """Check a table or plot against the runs of its benchmark.

    It must be possible to evaluate the condition `where` for every run, unless it contains a value
    of records, such as the commit. A cell for published figures (values that other authors
    measured) must not match more than one figure.

    Yields:
        For each error, the path of the key within the table or plot, and the error message.
    """
    if not runs:  # the filter removed all runs of this benchmark
        return
    chosen = list(runs)
    if view.where is not None:
        params = sorted({name for run in runs for name in run.params})
        condition = Condition(view.where, params, recorded=FILTERS)
        if condition.named - set(params):  # needs records, which the runs may not have yet
            return
        try:
            chosen = [run for run in runs if condition(run.params)]
        except ConditionError as error:
            yield ("where",), str(error)
    if isinstance(view, Table):
        yield from _ambiguous_figures(view, chosen)


def _ambiguous_figures(table: Table, runs: Sequence[Run]) -> Iterator[tuple[DataPath, str]]:
    for i, source in enumerate(table.published if runs else ()):
        dims = [name for name in table.rows if name in runs[0].params]
        if not source.on.keys() <= set(dims):  # needs records, such as for the device
            continue
        keys = dict.fromkeys(tuple(run.params[name] for name in dims) for run in runs)
        try:
            published_columns(source, dims, list(keys))
        except TableError as error:
            yield ("published", i), str(error)


def _recorded_problem(name: str, value: Any) -> str | None:
    """Return an error message if a value of records can never equal the given value, else None.

    The name is one of `FILTERS`, such as `commit`.
    """
    if not isinstance(value, str):
        return f"{name}: got {value!r}, expected text; write it in quotes"
    form, example = _FORMS.get(name, ("", ""))
    if form and not re.fullmatch(form, value):
        return f"{name}: got {value!r}, expected a value as in tables, such as {example}"
    return None


def check_views(document: Document, benchmarks: Benchmarks) -> list[Problem]:
    """Return the errors in the tables and plots of a sweep file.

    Each table or plot shows the runs of one benchmark. It is checked against the parameters of this
    benchmark.
    """
    used = {benchmark.name: benchmark for _, benchmark in run_scopes(document, benchmarks)}
    problems: list[Problem] = []
    for key, kind in (("tables", Table), ("plots", Plot)):
        names: set[str] = set()
        for path, view in valid_entries(document, key, kind):
            if view.name in names:
                what = f"{key}: the name {view.name!r} is used twice; names must be unique"
                problems.append(Problem(document.at((*path, "name")), what))
            names.add(view.name)
            wanted = benchmarks.own.name if view.benchmark is None else short_name(view.benchmark)
            if wanted in used:
                problems += _ViewCheck(document, used[wanted]).problems_of(path, view)
            else:
                what = f"benchmark: no run of this sweep has benchmark {wanted!r}"
                where = document.at((*path, "benchmark"))
                problems.append(Problem(where, what + nearest(wanted, list(used))))
    return problems


class _ViewCheck:
    """Checks one table or plot against the parameters of its benchmark."""

    def __init__(self, document: Document, benchmark: Benchmark):
        self.document = document
        self.benchmark = benchmark
        self.fields = benchmark.fields
        self.check = value_check(benchmark)
        self.problems: list[Problem] = []

    def problems_of(self, path: DataPath, view: Table | Plot) -> list[Problem]:
        """Return the errors in a table or plot, such as unknown names or a wrong unit."""
        if isinstance(view, Plot):
            self.value_and_unit(path, view)
            dims = {"x": [view.x], "series": view.series, "facet": view.facet}
            self.dims(path, dims)
        else:
            self.table(path, view)
        for name in names_in_title(view.title or ""):
            if name not in self.fields:
                what = f"title: no parameter {name!r}{nearest(name, list(self.fields))}"
                self.at((*path, "title"), what)
        if view.where is not None:
            try:
                Condition(view.where, self.fields, self.literal, FILTERS)
            except ConditionError as error:
                self.at((*path, "where"), str(error))
        return self.problems

    def literal(self, name: str, value: Any) -> str | None:
        """Return an error message if a name in `where` can never have this value, else None."""
        if name in self.fields:
            return literal_check(self.benchmark)(name, value)
        return _recorded_problem(name, value)

    def at(self, path: DataPath, what: str) -> None:
        self.problems.append(Problem(self.document.at(path), what))

    def at_key(self, path: DataPath, what: str) -> None:
        self.problems.append(Problem(self.document.at_key(path), what))

    def table(self, path: DataPath, table: Table) -> None:
        for i, source in enumerate(table.published):
            for name in source.on:
                if name not in table.rows:
                    rows = ", ".join(table.rows) or "none"
                    what = f"on: {name!r} is not one of the table's rows (rows: {rows})"
                    self.at_key((*path, "published", i, "on", name), what)
            for place, what in published_problems(source):
                self.at((*path, "published", i, *place), what)
        if table.list_fact is not None:
            for key in NOT_OF_LISTS & table.model_fields_set:
                self.at_key((*path, key), f"{key}: not allowed together with the key 'list'")
            self.dims(path, {"rows": table.rows}, without=("phase", "value"))
            return
        if table.limit is not None:
            self.at_key((*path, "limit"), "limit: only allowed together with the key 'list'")
        self.value_and_unit(path, table)
        self.dims(path, {"rows": table.rows, "columns": table.columns})
        self.baseline(path, table)

    def value_and_unit(self, path: DataPath, view: Table | Plot) -> None:
        phases = [view.phase] if isinstance(view.phase, str) else view.phase or []
        for i, phase in enumerate(phases):
            if phase in phases[:i]:  # its samples would be counted twice
                self.at((*path, "phase", i), f"phase: {phase!r} is listed twice")
        values = [view.value] if isinstance(view.value, str) else view.value
        for i, value in enumerate(values):
            place = (*path, "value", i)  # for a single value, `Document.at` ignores the index
            if value in values[:i]:
                self.at(place, f"value: {value!r} is listed twice")
            unknown = unknown_value(value)
            if unknown:
                self.at(place, f"value: {unknown}")
                return
            if value.startswith(PREDICTED) and not self.benchmark.predicts:
                name = self.benchmark.name
                what = f"value: benchmark {name!r} has no function predict(params)"
                self.at(place, what)
        can = {unit: None for value in values for unit in units_of(value)}
        if view.unit is not None and view.unit not in can:
            given = " and ".join(values)
            valid = ", ".join(can) or "none; remove this key"
            what = f"unit: {given} cannot be shown in {view.unit} (valid: {valid})"
            if any(value.startswith(NAMED) for value in values):
                what += "; only names with the suffix _ms, _seconds or _bytes have a unit"
            self.at((*path, "unit"), what)

    def dims(
        self, path: DataPath, dims: dict[str, list[str]], without: tuple[str, ...] = ()
    ) -> None:
        """Check the keys of a table or plot that list parameters, such as `rows` and `columns`.

        Each name must be a parameter of the benchmark, or one of the names `phase`, `device`,
        `repeat`, `value`, `commit`, `host` and `gpu`. A name may occur only once. Errors are
        collected in `problems`. Names in `without` are not allowed.
        """
        seen: dict[str, str] = {}
        known = [name for name in (*self.fields, *PSEUDO, *RECORDED) if name not in without]
        for section, names in dims.items():
            for i, name in enumerate(names):
                place = (*path, section, i)
                if name not in known:
                    self.at(place, f"{section}: no parameter {name!r}{nearest(name, known)}")
                elif name in seen:
                    self.at(place, f"{section}: {name!r} is already in {seen[name]}")
                seen[name] = section

    def baseline(self, path: DataPath, table: Table) -> None:
        path = (*path, "baseline")
        if table.baseline == {}:
            self.at(path, "baseline must name a column and its value, got {}")
        for name, value in (table.baseline or {}).items():
            if name not in table.columns:
                columns = ", ".join(table.columns) or "none"
                what = f"baseline: {name!r} is not one of the table's columns (columns: {columns})"
                self.at_key((*path, name), what)
            elif name == "value":
                what = (
                    "baseline: 'value' is not allowed; columns of 'value' show different quantities"
                )
                self.at_key((*path, name), what)
            elif name in self.fields:
                wrong = self.check(name, value)
                if wrong:
                    self.at((*path, name), wrong)
            elif name in FILTERS:
                wrong = _recorded_problem(name, value)
                if wrong:
                    self.at((*path, name), f"baseline: {wrong}")
