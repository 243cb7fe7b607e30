"""Overrides from the command line: `key=value` for a parameter, a key, or a dotted path.

A list makes a parameter part of the grid.
"""

from __future__ import annotations

from typing import Any

from jobs.errors import Position, Problem, nearest
from jobs.sweep.schema import AXES, Sweep
from jobs.sweep.strict_yaml import DataPath, Document, parse


def apply_override(
    document: Document, argument: str, fields: list[str], problems: list[Problem]
) -> None:
    """Set in a document what one `key=value` says; what is wrong is added to the problems.

    Args:
        fields: the parameters of the sweep's benchmarks. Other keys are those of the sweep.
    """
    where = Position(f"command line: {argument}")
    key, equals, text = argument.partition("=")
    if not equals or not key:
        problems.append(Problem(where, "expected key=value, for example seq_len=[128,256]"))
        return
    given = parse(text, where.source)
    problems.extend(Problem(where, problem.message) for problem in given.problems)
    path: DataPath
    if key in fields:
        path = _set_parameter(document, key, given.data)
    else:
        path = tuple(key.split("."))
        known = sorted({*Sweep.model_fields, *fields} - {"filter"})
        if path[0] not in known:
            what = f"{path[0]!r} is neither a parameter nor a key of a sweep"
            problems.append(Problem(where, what + nearest(str(path[0]), known)))
            return
        wrong = _set_key(document.data, path, given.data)
        if wrong:
            problems.append(Problem(where, wrong))
            return
    forget(document, path)
    document.positions[path] = document.keys[path] = where


def _set_parameter(document: Document, name: str, value: Any) -> DataPath:
    """Give a parameter one value, or a list of them, in every block."""
    section = "grid" if isinstance(value, list) else "fixed"
    data = document.data
    grid = data.get("grid")
    kept = section == "grid" and isinstance(grid, dict) and name in grid
    cases = data.get("cases")
    for i, case in enumerate(cases if isinstance(cases, list) else []):
        if isinstance(case, dict):
            remove_parameter(document, ("cases", i), case, name)
    if not kept:  # else it keeps its place in the product's order
        remove_parameter(document, (), data, name)
    if data.get(section) is None:
        data[section] = {}
    if isinstance(data[section], dict):  # else the schema reports the section
        data[section] = {**data[section], name: value}
    return (section, name)


def _set_key(data: dict[str, Any], path: DataPath, value: Any) -> str | None:
    """Set a dotted key, or say why that cannot be."""
    for i, parent in enumerate(path[:-1]):
        inner = data.get(str(parent))
        if inner is not None and not isinstance(inner, dict):
            dotted = ".".join(str(part) for part in path[: i + 1])
            return f"{dotted} is no mapping, so nothing inside it can be set"
        data[str(parent)] = dict(inner or {})
        data = data[str(parent)]
    data[str(path[-1])] = value
    return None


def remove_parameter(
    document: Document, prefix: DataPath, block: dict[str, Any], name: str
) -> None:
    """Take a parameter out of a block, whichever section sets it."""
    for axis in AXES:
        section = block.get(axis)
        if isinstance(section, dict) and name in section:
            block[axis] = {k: v for k, v in section.items() if k != name}
            forget(document, (*prefix, axis, name))


def forget(document: Document, path: DataPath) -> None:
    for table in (document.positions, document.keys):
        for known in [p for p in table if p[: len(path)] == path]:
            del table[known]
