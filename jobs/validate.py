"""The checks of a sweep against the schema, and of its tables and plots against their benchmarks.

No check stops at the first `Problem`. `jobs.parameters` checks what the runs are made of.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from jobs.benchmarks import Benchmark, Benchmarks, adapter, short_name
from jobs.conditions import Check, Condition, ConditionError, nearest
from jobs.published import entry_problems
from jobs.schema import (
    NAMED,
    PREDICTED,
    PSEUDO,
    VALUES,
    Case,
    Launch,
    Plot,
    Published,
    Resources,
    Shuffle,
    Slurm,
    Sweep,
    Table,
    units_of,
)
from jobs.strict_yaml import Document, Position, Problem
from jobs.strict_yaml import Path as DataPath

STRICT = ConfigDict(strict=True)
NOT_OF_LISTS = {"value", "columns", "baseline", "phase", "statistic", "direction"}


def validate_schema(document: Document, problems: list[Problem]) -> Sweep | None:
    try:
        return Sweep.model_validate(document.data)
    except ValidationError as error:
        problems.extend(schema_problems(error, document))
        return None


def schema_problems(error: ValidationError, document: Document) -> list[Problem]:
    """pydantic's errors, each at its place in the file, in the words of the file."""
    problems: list[Problem] = []
    expected: dict[tuple[Position, str], list[str]] = {}  # the members of a union, together
    for item in error.errors():
        path = _locate(item["loc"], document.data)
        if item["type"] == "missing":
            path = (*path, item["loc"][-1])
        dotted = ".".join(str(part) for part in path)
        if item["type"] == "extra_forbidden":
            what = f"unknown key {path[-1]!r}{nearest(str(path[-1]), _valid_keys(path))}"
            problems.append(Problem(document.at_key(path), what))
        elif item["type"] == "missing":
            problems.append(Problem(document.at(path[:-1]), f"{dotted} is required"))
        else:
            prefix = f"{dotted}: given {_shown(item['input'])}"
            expected.setdefault((document.at(path), prefix), []).append(_expected(item))
    return problems + [
        Problem(position, f"{prefix}, expected {' or '.join(dict.fromkeys(wanted))}")
        for (position, prefix), wanted in expected.items()
    ]


def _expected(item: Any) -> str:
    """What pydantic would have taken, and the nearest of its words."""
    text: str = item["msg"]
    for prefix in ("Input should be ", "Value error, "):
        text = text.removeprefix(prefix)
    text = text.replace("String should match pattern", "text of the form")
    text = re.sub(r"a valid dictionary( or instance of \w+)?", "a mapping", text)
    words = re.findall(r"'([^']*)'", item.get("ctx", {}).get("expected") or "")
    if isinstance(item["input"], str) and words:
        text += nearest(item["input"], words).split(" (valid")[0]
    return text


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _locate(loc: tuple[str | int, ...], data: Any) -> DataPath:
    """The part of a location that the data has: pydantic adds the members of a union."""
    path: list[str | int] = []
    here = data
    for part in loc:
        in_list = isinstance(here, list) and isinstance(part, int) and part < len(here)
        if in_list or (isinstance(here, dict) and part in here):
            here = here[part]
            path.append(part)
    return tuple(path)


def _valid_keys(path: DataPath) -> list[str]:
    models: dict[str, type[BaseModel]] = {
        "resources": Resources,
        "launch": Launch,
        "slurm": Slurm,
        "cases": Case,
        "tables": Table,
        "published": Published,
        "plots": Plot,
        "order": Shuffle,
    }
    names = [part for part in path[:-1] if isinstance(part, str)]
    model = models.get(names[-1], Sweep) if names else Sweep
    if model is not Sweep:
        return list(model.model_fields)
    return sorted({*Sweep.model_fields, "base"} - {"filter"})


def value_check(benchmark: Benchmark) -> Check:
    """(parameter, value) -> why the parameter cannot have the value, or None."""

    @cache
    def adapted(name: str) -> TypeAdapter[Any]:
        field = benchmark.params.model_fields[name]
        kind = field.annotation
        is_model = isinstance(kind, type) and issubclass(kind, BaseModel)  # has its own config
        return adapter(field, None if is_model else STRICT)

    def check(name: str, value: Any) -> str | None:
        try:
            adapted(name).validate_python(value)
        except ValidationError as error:
            wanted = dict.fromkeys(_expected(item) for item in error.errors())
            return f"{name}: given {_shown(value)}, expected {' or '.join(wanted)}"
        return None

    return check


def literal_check(benchmark: Benchmark) -> Check:
    """For `Condition`: like `value_check`, but 128.0 equals the integer 128."""
    check = value_check(benchmark)

    def checked(name: str, literal: Any) -> str | None:
        if isinstance(literal, float) and literal.is_integer() and not check(name, int(literal)):
            return None
        return check(name, literal)

    return checked


def valid_entries(document: Document, key: str, kind: Any) -> Iterator[tuple[DataPath, Any]]:
    """The entries of a list that are as the schema wants them; of the others the schema tells."""
    items = document.data.get(key)
    is_model = isinstance(kind, type) and issubclass(kind, BaseModel)
    entry: TypeAdapter[Any] = TypeAdapter(kind, config=None if is_model else STRICT)
    for i, item in enumerate(items if isinstance(items, list) else []):
        try:
            yield (key, i), entry.validate_python(item)
        except ValidationError:
            continue


def run_blocks(
    document: Document, benchmarks: Benchmarks
) -> list[tuple[dict[str, Any], Benchmark]]:
    """The blocks that give runs, each with its benchmark: the cases, or else the sweep itself."""
    cases = document.data.get("cases")
    blocks = [case for case in cases if isinstance(case, dict)] if isinstance(cases, list) else []
    return [(block, benchmark_of(block, benchmarks)) for block in blocks or [document.data]]


def benchmark_of(block: dict[str, Any], benchmarks: Benchmarks) -> Benchmark:
    name = block.get("benchmark")
    return benchmarks.of(name if isinstance(name, str) else None)


def check_views(document: Document, benchmarks: Benchmarks) -> list[Problem]:
    """What is wrong with a sweep's tables and plots: each is of one benchmark."""
    used = {benchmark.name: benchmark for _, benchmark in run_blocks(document, benchmarks)}
    problems: list[Problem] = []
    for key, kind in (("tables", Table), ("plots", Plot)):
        names: set[str] = set()
        for path, view in valid_entries(document, key, kind):
            if view.name in names:
                what = f"{key}: two are named {view.name!r}"
                problems.append(Problem(document.at((*path, "name")), what))
            names.add(view.name)
            wanted = benchmarks.own.name if view.benchmark is None else short_name(view.benchmark)
            if wanted in used:
                problems += _View(document, used[wanted]).problems_of(path, view)
            else:
                what = f"benchmark: no run of this sweep is of {wanted!r}"
                where = document.at((*path, "benchmark"))
                problems.append(Problem(where, what + nearest(wanted, list(used))))
    return problems


def unknown_value(name: str) -> str | None:
    """That no value has this name, and which do; None where one has."""
    if name in VALUES or (name.startswith(NAMED) and name not in NAMED):
        return None
    hint = nearest(name, [*VALUES, *(f"{prefix}<name>" for prefix in NAMED)])
    return f"{name!r} is not known{hint}"


class _View:
    """The checks of a table or plot against its benchmark."""

    def __init__(self, document: Document, benchmark: Benchmark):
        self.document = document
        self.benchmark = benchmark
        self.fields = benchmark.fields
        self.check = value_check(benchmark)
        self.problems: list[Problem] = []

    def problems_of(self, path: DataPath, view: Table | Plot) -> list[Problem]:
        """Names that exist, a value that is known, a unit that fits it."""
        if isinstance(view, Plot):
            self.value_and_unit(path, view)
            dims = {"x": [view.x], "series": view.series, "facet": view.facet}
            self.dims(path, dims)
        else:
            self.table(path, view)
        if view.where is not None:
            try:
                Condition(view.where, self.fields, literal_check(self.benchmark))
            except ConditionError as error:
                self.at((*path, "where"), str(error))
        return self.problems

    def at(self, path: DataPath, what: str) -> None:
        self.problems.append(Problem(self.document.at(path), what))

    def at_key(self, path: DataPath, what: str) -> None:
        self.problems.append(Problem(self.document.at_key(path), what))

    def table(self, path: DataPath, table: Table) -> None:
        for i, source in enumerate(table.published):
            for name in source.on:
                if name not in table.rows:
                    listed = ", ".join(table.rows) or "there are none"
                    what = f"on: {name!r} is none of the table's rows ({listed})"
                    self.at_key((*path, "published", i, "on", name), what)
            for place, what in entry_problems(source):
                self.at((*path, "published", i, *place), what)
        if table.text is not None:
            from jobs.texts import text_problems  # with what reads records: only where needed

            for what in text_problems(table.text, self.fields, self.check):
                self.at((*path, "text"), what)
        if table.list is not None:
            for key in NOT_OF_LISTS & table.model_fields_set:
                self.at_key((*path, key), f"{key}: a table of a list has none")
            self.dims(path, {"rows": table.rows}, without=("phase", "value"))
            return
        if table.limit is not None:
            self.at_key((*path, "limit"), "limit: only a table of a list has one")
        self.value_and_unit(path, table)
        self.dims(path, {"rows": table.rows, "columns": table.columns})
        self.baseline(path, table)

    def value_and_unit(self, path: DataPath, view: Table | Plot) -> None:
        phases = [view.phase] if isinstance(view.phase, str) else view.phase or []
        for i, phase in enumerate(phases):
            if phase in phases[:i]:  # its samples would count twice
                self.at((*path, "phase", i), f"phase: {phase!r} stands there twice")
        values = [view.value] if isinstance(view.value, str) else view.value
        for i, value in enumerate(values):
            place = (*path, "value", i)  # that of the value itself where it is no list
            if value in values[:i]:
                self.at(place, f"value: {value!r} stands there twice")
            unknown = unknown_value(value)
            if unknown:
                self.at(place, f"value: {unknown}")
                return
            if value.startswith(PREDICTED) and not self.benchmark.predicts:
                what = f"value: benchmark {self.benchmark.name!r} has no predict(params)"
                self.at(place, what)
        can = {unit: None for value in values for unit in units_of(value)}
        if view.unit is not None and view.unit not in can:
            given = " and ".join(values)
            valid = ", ".join(can) or "none but its own"
            what = f"unit: {given} cannot be shown in {view.unit} (valid: {valid})"
            if any(value.startswith(NAMED) for value in values):
                what += "; a fact's name says its unit: _ms, _seconds or _bytes"
            self.at((*path, "unit"), what)

    def dims(
        self, path: DataPath, dims: dict[str, list[str]], without: tuple[str, ...] = ()
    ) -> None:
        """Each name is a parameter or a pseudo-dimension, and stands in one place."""
        seen: dict[str, str] = {}
        known = [name for name in (*self.fields, *PSEUDO) if name not in without]
        for section, listed in dims.items():
            for i, name in enumerate(listed):
                place = (*path, section, i)
                if name not in known:
                    self.at(place, f"{section}: no parameter {name!r}{nearest(name, known)}")
                elif name in seen:
                    self.at(place, f"{section}: {name!r} stands in {seen[name]} already")
                seen[name] = section

    def baseline(self, path: DataPath, table: Table) -> None:
        path = (*path, "baseline")
        if table.baseline == {}:
            self.at(path, "baseline: expected a column and its value")
        for name, value in (table.baseline or {}).items():
            if name not in table.columns:
                listed = ", ".join(table.columns) or "there are none"
                self.at_key((*path, name), f"baseline: {name!r} is none of the columns ({listed})")
            elif name == "value":
                self.at_key((*path, name), "baseline: one value is no speed-up of another")
            elif name in self.fields:
                wrong = self.check(name, value)
                if wrong:
                    self.at((*path, name), wrong)
