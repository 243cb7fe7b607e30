"""The checks of a sweep: against the schema, against the benchmark's parameters, against itself.

Each check appends to a list of `Problem`s and never stops at the first.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from jobs.benchmarks import Benchmark
from jobs.conditions import Check, Condition, ConditionError, nearest
from jobs.schema import (
    AXES,
    PSEUDO,
    VALUES,
    Case,
    Launch,
    Plot,
    Resources,
    Shuffle,
    Slurm,
    Sweep,
    Table,
)
from jobs.strict_yaml import Document, Position, Problem
from jobs.strict_yaml import Path as DataPath


def validate_schema(document: Document, problems: list[Problem]) -> Sweep | None:
    try:
        return Sweep.model_validate(document.data)
    except ValidationError as error:
        problems.extend(schema_problems(error, document))
        return None


def schema_problems(error: ValidationError, document: Document) -> list[Problem]:
    """pydantic's errors, each at its place in the file, in the words of the file."""
    found: dict[tuple[Position, str], list[str]] = {}
    for item in error.errors():
        path, model = _locate(item["loc"], document.data)
        dotted = ".".join(str(part) for part in path)
        if item["type"] == "extra_forbidden":
            valid = _valid_keys(path)
            message = f"unknown key {path[-1]!r}{nearest(str(path[-1]), valid)}"
            found.setdefault((document.at_key(path), message), [])
        elif item["type"] == "missing":
            found.setdefault((document.at(path[:-1]), f"{dotted} is required"), [])
        else:
            given = item["input"]
            prefix = f"{dotted}: given {_shown(given)}"
            expected = item["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
            expected = expected.replace("String should match pattern", "text of the form")
            found.setdefault((document.at(path), prefix), []).append(
                expected + _nearest_literal(given, item.get("ctx", {}).get("expected"))
            )
    return [
        Problem(position, f"{prefix}, expected {' or '.join(dict.fromkeys(wanted))}")
        if wanted
        else Problem(position, prefix)
        for (position, prefix), wanted in found.items()
    ]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _nearest_literal(given: Any, expected: str | None) -> str:
    if not isinstance(given, str) or not expected:
        return ""
    close = nearest(given, re.findall(r"'([^']*)'", expected)).split(" (valid")[0]
    return close


def _locate(loc: tuple[str | int, ...], data: Any) -> tuple[DataPath, Any]:
    """Drop what pydantic adds to a location for the members of a union."""
    path: list[str | int] = []
    here = data
    for part in loc:
        if (isinstance(here, dict) and (part in here)) or (isinstance(here, list) and isinstance(part, int) and part < len(here)):
            here = here[part]
            path.append(part)
        elif isinstance(here, dict) and part == loc[-1]:
            path.append(part)  # a missing key
    return tuple(path), here


def _valid_keys(path: DataPath) -> list[str]:
    models: dict[str, type[BaseModel]] = {
        "resources": Resources,
        "launch": Launch,
        "slurm": Slurm,
        "cases": Case,
        "tables": Table,
        "plots": Plot,
        "order": Shuffle,
    }
    names = [part for part in path[:-1] if isinstance(part, str)]
    model = models.get(names[-1], Sweep) if names else Sweep
    return [*model.model_fields, *(["base"] if model is Sweep else [])]


def check_params(document: Document, benchmark: Benchmark, problems: list[Problem]) -> None:
    """Every parameter exists, every value is valid for it, no block sets one twice."""
    checkers = {
        name: TypeAdapter(
            Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation,
            config=None if _is_model(field.annotation) else ConfigDict(strict=True),
        )
        for name, field in benchmark.params.model_fields.items()
    }
    data = document.data
    cases = data.get("cases")
    blocks: list[tuple[DataPath, Any]] = [((), data)]
    blocks += [
        (("cases", i), case) for i, case in enumerate(cases if isinstance(cases, list) else [])
    ]
    for prefix, block in blocks:
        if not isinstance(block, dict):
            continue
        seen: dict[str, str] = {}
        lengths: dict[str, int] = {}
        for axis in AXES:
            section = block.get(axis)
            if not isinstance(section, dict):
                continue
            for name, value in section.items():
                path = (*prefix, axis, name)
                if name not in checkers:
                    hint = nearest(name, benchmark.fields)
                    what = f"benchmark {benchmark.name!r} has no parameter {name!r}{hint}"
                    problems.append(Problem(document.at_key(path), what))
                    continue
                if name in seen:
                    what = f"{name!r} is set in both {seen[name]} and {axis}"
                    problems.append(Problem(document.at_key(path), what))
                seen[name] = axis
                if axis == "fixed":
                    _check_value(checkers[name], name, value, document.at(path), problems)
                elif isinstance(value, list):
                    lengths[name] = len(value)
                    for i, one in enumerate(value):
                        where = document.at((*path, i))
                        _check_value(checkers[name], name, one, where, problems)
        zipped = {n: lengths[n] for n in (block.get("zip") or {}) if n in lengths}
        if len(set(zipped.values())) > 1:
            listed = ", ".join(f"{name} {length}" for name, length in zipped.items())
            where = document.at_key((*prefix, "zip"))
            problems.append(Problem(where, f"zip: lists of different lengths: {listed}"))


def _is_model(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _check_value(
    checker: TypeAdapter[Any], name: str, value: Any, where: Position, problems: list[Problem]
) -> None:
    try:
        checker.validate_python(value)
    except ValidationError as error:
        wanted = []
        for item in error.errors():
            expected = item["msg"].removeprefix("Input should be ")
            wanted.append(expected + _nearest_literal(value, item.get("ctx", {}).get("expected")))
        message = f"{name}: given {_shown(value)}, expected {' or '.join(dict.fromkeys(wanted))}"
        problems.append(Problem(where, message))


def literal_check(benchmark: Benchmark) -> Check:
    """For `Condition`: whether a parameter can equal a literal at all."""

    def check(name: str, literal: Any) -> str | None:
        field = benchmark.params.model_fields.get(name)
        if field is None or not isinstance(literal, str):
            return None
        found: list[Problem] = []
        adapter: TypeAdapter[Any] = TypeAdapter(field.annotation, config=ConfigDict(strict=True))
        _check_value(adapter, name, literal, Position(""), found)
        return found[0].message if found else None

    return check


def exclusions(sweep: Sweep, benchmark: Benchmark) -> list[Condition]:
    """`exclude` as conditions: a mapping is the conjunction of its equalities and lists."""
    conditions = []
    for item in sweep.exclude:
        if isinstance(item, dict):
            parts = [
                f"{k} in {v!r}" if isinstance(v, list) else f"{k} == {v!r}" for k, v in item.items()
            ]
            item = " and ".join(parts)
        conditions.append(Condition(item, benchmark.fields, literal_check(benchmark)))
    return conditions


def check_conditions(
    sweep: Sweep, document: Document, benchmark: Benchmark, problems: list[Problem]
) -> None:
    for i, item in enumerate(sweep.exclude):
        where = document.at(("exclude", i))
        if isinstance(item, dict):
            for name in item:
                if name not in benchmark.fields:
                    hint = nearest(name, benchmark.fields)
                    what = f"exclude: no parameter {name!r}{hint}"
                    problems.append(Problem(document.at_key(("exclude", i, name)), what))
        if not item:
            problems.append(Problem(where, "exclude: an empty entry would exclude every run"))
    if problems:
        return
    for i, _ in enumerate(sweep.exclude):
        try:
            exclusions(sweep.model_copy(update={"exclude": [sweep.exclude[i]]}), benchmark)
        except ConditionError as error:
            problems.append(Problem(document.at(("exclude", i)), str(error)))
    if sweep.filter is not None:
        try:
            Condition(sweep.filter, benchmark.fields, literal_check(benchmark))
        except ConditionError as error:
            problems.append(Problem(document.at(("filter",)), str(error)))


def check_views(
    sweep: Sweep, document: Document, benchmark: Benchmark, problems: list[Problem]
) -> None:
    for kind, views in (("tables", sweep.tables), ("plots", sweep.plots)):
        names: set[str] = set()
        for i, view in enumerate(views):
            if view.name in names:
                what = f"{kind}: two are named {view.name!r}"
                problems.append(Problem(document.at((kind, i, "name")), what))
            names.add(view.name)
            if view.value not in VALUES and not view.value.startswith("fact."):
                hint = nearest(view.value, [*VALUES, "fact.<name>"])
                what = f"value: {view.value!r} is not known{hint}"
                problems.append(Problem(document.at((kind, i, "value")), what))
            dims = (
                [("rows", view.rows), ("columns", view.columns), ("baseline", view.baseline or {})]
                if isinstance(view, Table)
                else [("x", [view.x]), ("series", view.series), ("facet", view.facet)]
            )
            for section, listed in dims:
                for name in listed:
                    if name not in benchmark.fields and name not in PSEUDO:
                        hint = nearest(name, [*benchmark.fields, *PSEUDO])
                        what = f"{section}: no parameter {name!r}{hint}"
                        problems.append(Problem(document.at((kind, i, section)), what))
            if isinstance(view, Table):
                for name in view.baseline or {}:
                    if name not in view.columns:
                        what = f"baseline: {name!r} must be one of the columns {view.columns}"
                        problems.append(Problem(document.at((kind, i, "baseline")), what))
            if view.where is not None:
                try:
                    Condition(view.where, benchmark.fields, literal_check(benchmark))
                except ConditionError as error:
                    problems.append(Problem(document.at((kind, i, "where")), str(error)))


def check_references(
    sweep: Sweep, document: Document, benchmark: Benchmark, problems: list[Problem]
) -> None:
    """Each `$name` is a parameter; a case's resources and launch are valid once merged."""
    for i, case in enumerate(sweep.cases):
        for section, model in (("resources", Resources), ("launch", Launch)):
            given = getattr(case, section)
            try:
                model.model_validate(given)
            except ValidationError as error:
                inner = Document(given, document.source)
                prefix = ("cases", i, section)
                for table, target in (
                    (document.positions, inner.positions),
                    (document.keys, inner.keys),
                ):
                    for path, position in table.items():
                        if path[: len(prefix)] == prefix:
                            target[path[len(prefix) :]] = position
                for item in schema_problems(error, inner):
                    message = item.message
                    if message.startswith("unknown key"):
                        message = message.split(";")[0].split(" (valid")[0]
                        message += f" (valid: {', '.join(model.model_fields)})"
                    problems.append(Problem(item.position, f"{section}: {message}"))
    places = [((s,), dict(getattr(sweep, s))) for s in ("resources", "launch")]
    for i, case in enumerate(sweep.cases):
        places += [(("cases", i, s), getattr(case, s)) for s in ("resources", "launch")]  # type: ignore[list-item]
    for prefix, section in places:
        for key, value in section.items():
            if (
                isinstance(value, str)
                and value.startswith("$")
                and value[1:] not in benchmark.fields
            ):
                hint = nearest(value[1:], benchmark.fields)
                what = f"{key}: {value!r} names no parameter{hint}"
                problems.append(Problem(document.at((*prefix, key)), what))
