"""Checks of a sweep file beyond the types of its values: names, values and conditions.

Which names and values are valid depends on the benchmarks of the runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from jobs.errors import nearest
from jobs.sweep.benchmarks import Benchmark, Benchmarks
from jobs.sweep.conditions import ConditionError, condition_of
from jobs.sweep.resources import RESERVED
from jobs.sweep.schema import AXES, Blocks, Exclusion
from jobs.sweep.strict_yaml import Faults, below, entries, fault
from jobs.sweep.views import Plot, Table

_Scopes = list[dict[str, Any]]  # what describes runs: the cases, or the top level of the file
_adapter = cache(TypeAdapter)  # validates a type


def sweep_faults(data: dict[str, Any], benchmarks: Benchmarks) -> Faults:
    """Yield the errors in the content of a sweep file. Values of wrong types are left out."""
    scopes = [case for _, case in entries(data.get("cases"))] or [{}]
    yield from _scope_faults(data, scopes, benchmarks)
    for i, case in entries(data.get("cases")):
        yield from below(_scope_faults(case, [case], benchmarks), "cases", i)
    exclude = data.get("exclude")
    for i, given in enumerate(exclude if isinstance(exclude, list) else ()):
        if not given:
            yield fault("exclude: an empty entry would exclude every run; remove it", "exclude", i)
        elif _valid(Exclusion, given) is not None:
            yield from _condition_faults(given, benchmarks, "exclude", i)
    if isinstance(data.get("filter"), str):
        yield from _condition_faults(data["filter"], benchmarks, "filter")
    blocks: Blocks | None = _valid(Blocks, data.get("blocks"))
    if blocks is not None and (blocks.interleave or blocks.baseline):
        yield from below(_block_faults(blocks, benchmarks), "blocks")
        repeats = data.get("repeats")
        if type(repeats) is int and repeats > 1:
            what = "repeats must be 1 together with blocks; set blocks.rounds instead"
            yield fault(f"{what}, got {repeats}", "repeats")
    slurm = data.get("slurm")
    for section, key, _ in _items(slurm, ("additional_parameters",)):
        if key.replace("_", "-") in RESERVED:
            what = f"slurm.{section}: got {key!r}, expected another option; the submit command"
            yield fault(f"{what} sets this one", "slurm", section, key, at_key=True)
    used = _benchmarks_of(scopes, benchmarks)
    for key, kind in (("tables", Table), ("plots", Plot)):
        names: set[str] = set()
        for i, given in entries(data.get(key)):
            name = given.get("name")
            if isinstance(name, str) and name in names:
                what = f"{key}: the name {name!r} is used twice; names must be unique"
                yield fault(what, key, i, "name")
            names.add(str(name))
            view: Table | Plot | None = _valid(kind, given)
            if view is not None:
                yield from below(view.faults(benchmarks.own, used), key, i)


def _valid(kind: Any, given: Any) -> Any:
    """Return a part of a sweep file as its type, or None if it has values of wrong types."""
    try:
        return _adapter(kind).validate_python(given, strict=True)
    except ValidationError:
        return None


def _condition_faults(given: Any, benchmarks: Benchmarks, *path: str | int) -> Faults:
    try:
        condition_of(given, benchmarks)
    except ConditionError as error:
        yield fault(str(error), *path)


def _block_faults(blocks: Blocks, benchmarks: Benchmarks) -> Faults:
    fields = benchmarks.fields
    for key in ("interleave", "baseline"):
        if not getattr(blocks, key):
            yield fault(f"blocks.{key} is required")
    for i, name in enumerate(blocks.interleave):
        if name not in fields:
            what = f"blocks.interleave must name parameters, got {name!r}"
            yield fault(what + nearest(name, fields), "interleave", i)
        elif name in blocks.interleave[:i]:
            yield fault(f"blocks.interleave: {name!r} is listed twice", "interleave", i)
    for name in blocks.baseline if set(blocks.interleave) <= set(fields) else ():
        if name not in blocks.interleave:
            what = "blocks.baseline must set parameters that blocks.interleave lists"
            hint = nearest(name, blocks.interleave)
            yield fault(f"{what}, got {name!r}{hint}", "baseline", name)
    if blocks.rounds == 1 and blocks.margin is not None:
        yield fault("blocks.margin requires at least 2 rounds, got rounds: 1", "margin")
    if blocks.sustained is not None and blocks.sustained.where is not None:
        yield from _condition_faults(blocks.sustained.where, benchmarks, "sustained", "where")


def _scope_faults(given: dict[str, Any], scopes: _Scopes, benchmarks: Benchmarks) -> Faults:
    """Yield the errors in the parameters and resources that scopes set or inherit.

    `given` is a case, which is then the only scope, or the top level of the file.
    """
    all_of = _benchmarks_of(scopes, benchmarks)
    seen: dict[str, str] = {}
    lengths: dict[str, int] = {}
    for axis, name, value in _items(given, AXES):
        having = [benchmark for benchmark in all_of if name in benchmark.fields]
        if not having:
            names = " and ".join(repr(benchmark.name) for benchmark in all_of)
            has = f"benchmark {names} has" if len(all_of) == 1 else f"benchmarks {names} have"
            fields = dict.fromkeys(field for benchmark in all_of for field in benchmark.fields)
            what = f"{has} no parameter {name!r}{nearest(name, list(fields))}"
            yield fault(what, axis, name, at_key=True)
            continue
        if name in seen:
            what = f"{name!r} is set in both {seen[name]} and {axis}; keep one"
            yield fault(what, axis, name, at_key=True)
        seen[name] = axis
        if axis != "fixed" and not isinstance(value, list):
            continue  # of the wrong type
        if axis == "zip":
            lengths[name] = len(value)
        inheriting = _inheriting(scopes, benchmarks, name, AXES)
        using = [benchmark for benchmark in inheriting if name in benchmark.fields] or having
        # The index of a single value is ignored.
        for i, one in enumerate([value] if axis == "fixed" else value):
            for benchmark in using if not isinstance(one, (list, dict)) else ():
                wrong = benchmark.wrong_value(name, one)
                of = f" (benchmark {benchmark.name!r})" if len(benchmarks) > 1 else ""
                if wrong:
                    yield fault(wrong + of, axis, name, i)
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{length} for {name!r}" for name, length in lengths.items())
        what = f"zip: all lists must have the same length, got {listed}"
        yield fault(what, "zip", at_key=True)
    for section, key, value in _items(given, ("resources", "launch")):
        name = value[1:] if isinstance(value, str) and value.startswith("$") else ""
        for benchmark in _inheriting(scopes, benchmarks, key, (section,)):
            if name.isidentifier() and name not in benchmark.fields:
                what = f"{key}: {value!r} does not name a parameter"
                if len(benchmarks) > 1:
                    what += f" of benchmark {benchmark.name!r}"
                yield fault(what + nearest(name, benchmark.fields), section, key)


def _inheriting(
    scopes: _Scopes, benchmarks: Benchmarks, key: str, sections: tuple[str, ...]
) -> list[Benchmark]:
    """Return the benchmarks of the scopes that do not set a key in one of the sections themselves.

    If all do, the benchmarks of all are returned, so that a value at the top level, which no case
    inherits, is checked anyway.
    """
    inherit = [s for s in scopes if not any(name == key for _, name, _ in _items(s, sections))]
    return _benchmarks_of(inherit or scopes, benchmarks)


def _benchmarks_of(scopes: _Scopes, benchmarks: Benchmarks) -> list[Benchmark]:
    names = (scope.get("benchmark") for scope in scopes)
    found = [benchmarks.of(name if isinstance(name, str) else None) for name in names]
    return list({benchmark.name: benchmark for benchmark in found}.values())


def _items(given: Any, sections: tuple[str, ...]) -> Iterator[tuple[str, str, Any]]:
    """Yield the section, key and value of each item of the sections that are mappings."""
    for section in sections:
        items = given.get(section) if isinstance(given, dict) else None
        for key, value in items.items() if isinstance(items, dict) else ():
            yield section, key, value
