"""Applies overrides from the command line to a sweep file.

The key may be a parameter of a benchmark, or a key of the sweep file such as `repeats` or
`slurm.partition`. A parameter that is set to a list becomes part of the key `grid`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from jobs.errors import Position, Problem, shown
from jobs.sweep.messages import hint_for_key
from jobs.sweep.schema import AXES, Sweep
from jobs.sweep.strict_yaml import DataPath, Document, entries, parse


def apply_override(document: Document, argument: str, fields: list[str]) -> None:
    """Apply an override `key=value` to a sweep file with the parameters `fields`.

    Errors in it are added to those of the file.
    """
    where = _position(argument)
    key, equals, text = argument.partition("=")
    if not equals or not key:
        what = "expected key=value, for example seq_len=[128,256]"
        if argument.endswith((".yaml", ".yml")):
            what += "; a submission has one sweep, so submit this one by itself"
        document.problems.append(Problem(where, what))
        return
    given = parse(text, where.source)
    document.problems.extend(Problem(where, problem.message) for problem in given.problems)
    path = key.split(".")
    known = sorted({*Sweep.model_fields, *fields} - {"filter"})
    if key in fields:
        path = ["grid" if isinstance(given.data, list) else "fixed", key]
        # A parameter in grid keeps its position, so the order of runs is unchanged.
        remove_parameters(document.data, {key}, AXES if path[0] == "fixed" else ("fixed", "zip"))
    elif path[0] not in known:
        what = f"{path[0]!r} is neither a parameter nor a key of a sweep"
        what += hint_for_key(path[0], known, Sweep)
        document.problems.append(Problem(where, what))
        return
    for _, case in entries(document.data.get("cases")):  # which would replace the new value
        if path[0] in AXES and len(path) == 2:
            remove_parameters(case, {path[1]})
        elif path[0] in ("resources", "launch", "timeout_s"):
            _remove(case, path)
    wrong = _set(document, path, given.data, where)
    if wrong:
        document.problems.append(Problem(where, wrong))


def repeated_overrides(arguments: Sequence[str]) -> list[Problem]:
    """Return an error for each override that replaces a part of an earlier one."""
    problems = []
    seen: dict[DataPath, str] = {}
    for argument in arguments:
        key, equals, _ = argument.partition("=")
        path = tuple(key.split("."))
        if len(path) == 2 and path[0] in AXES:
            path = path[1:]
        for other, first in seen.items():
            if equals and path[: len(other)] == other[: len(path)]:
                what = f"{key!r} must be given once, but is already set by {shown(first)!r}"
                problems.append(Problem(_position(argument), what))
                break
        seen.setdefault(path, argument)
    return problems


def remove_parameters(
    scope: dict[str, Any], names: Collection[str], axes: Sequence[str] = AXES
) -> None:
    """Remove parameters from `fixed`, `grid` and `zip` of a case, or of the top level of a file."""
    for axis in axes:
        section = scope.get(axis)
        if isinstance(section, dict):
            for name in names:
                section.pop(name, None)


def _position(argument: str) -> Position:
    return Position(f"command line: {shown(argument)}")


def _set(document: Document, path: list[str], value: Any, where: Position) -> str | None:
    """Set a value in nested mappings, which are created. Return a message if it is impossible."""
    inner = document.data
    for i, parent in enumerate(path[:-1], 1):
        if inner.get(parent) is None:
            inner[parent] = {}
            document.place(tuple(path[:i]), where)
        inner = inner[parent]
        if not isinstance(inner, dict):
            return f"{'.'.join(path[:i])} is not a mapping, so {'.'.join(path)} cannot be set"
    inner[path[-1]] = value
    document.place(tuple(path), where)
    return None


def _remove(case: dict[str, Any], path: list[str]) -> None:
    """Remove a key such as `resources.mem_gb` from a case."""
    inner: Any = case
    for parent in path[:-1]:
        inner = inner.get(parent) if isinstance(inner, dict) else None
    if isinstance(inner, dict):
        inner.pop(path[-1], None)
