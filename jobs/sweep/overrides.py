"""Applies overrides from the command line to a sweep file.

An override is `key=value`. The key may be a parameter of a benchmark, a key of the sweep file such
as `repeats`, or a dotted key such as `slurm.partition`. If a parameter is set to a list, it becomes
part of the key `grid`, so there are runs for each value in the list.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from jobs.errors import Position, Problem, nearest, shown
from jobs.sweep.schema import AXES, Sweep
from jobs.sweep.strict_yaml import DataPath, Document, parse


def apply_override(
    document: Document, argument: str, fields: list[str], problems: list[Problem]
) -> None:
    """Apply one override from the command line to a parsed sweep file.

    Args:
        argument: the override, `key=value`. The key is the name of a parameter, or a key of a sweep
            file such as `repeats` or `slurm.partition`.
        fields: names of the parameters of the sweep's benchmarks.
        problems: list to which errors in the override are added.
    """
    where = _position(argument)
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
        _remove_from_cases(document, path)
    forget(document, {path})
    document.positions[path] = document.keys[path] = where
    for end in range(1, len(path)):  # mappings that the override has created
        document.positions.setdefault(path[:end], where)
        document.keys.setdefault(path[:end], where)


def repeated_overrides(arguments: Sequence[str]) -> list[Problem]:
    """Return an error for each override that replaces an earlier one, or a part of it.

    For example, `grid.size=[1]` and `size=2` set the same parameter.
    """
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


def _position(argument: str) -> Position:
    return Position(f"command line: {shown(argument)}")


def _set_parameter(document: Document, name: str, value: Any) -> DataPath:
    """Set a parameter for all runs of a sweep, and return the path of the parameter.

    If the value is a list, the parameter is set in the key `grid`, else in the key `fixed`. The
    parameter is removed from all cases, because a case would replace the new value.
    """
    section = "grid" if isinstance(value, list) else "fixed"
    data = document.data
    grid = data.get("grid")
    kept = section == "grid" and isinstance(grid, dict) and name in grid
    cases = data.get("cases")
    for i, case in enumerate(cases if isinstance(cases, list) else []):
        if isinstance(case, dict):
            remove_parameters(document, ("cases", i), case, {name})
    if not kept:  # a parameter in grid keeps its position, so the order of runs is unchanged
        remove_parameters(document, (), data, {name})
    if data.get(section) is None:
        data[section] = {}
    if isinstance(data[section], dict):  # otherwise the schema check reports the section
        data[section] = {**data[section], name: value}
    return (section, name)


def _set_key(data: dict[str, Any], path: DataPath, value: Any) -> str | None:
    """Set a value in nested mappings. Return an error message if that is impossible, else None.

    Missing mappings are created.
    """
    for i, parent in enumerate(path[:-1]):
        inner = data.get(str(parent))
        if inner is not None and not isinstance(inner, dict):
            dotted = ".".join(str(part) for part in path[: i + 1])
            return (
                f"{dotted} is not a mapping, so {'.'.join(map(str, path))} cannot be set; "
                "only keys of mappings can be set, for example slurm.partition=h100"
            )
        data[str(parent)] = dict(inner or {})
        data = data[str(parent)]
    data[str(path[-1])] = value
    return None


def _remove_from_cases(document: Document, path: DataPath) -> None:
    """Remove a key such as `resources.mem_gb` from all cases, which would replace its new value.

    Only keys that a case can have, beside parameters, are removed.
    """
    if path[0] not in ("resources", "launch", "timeout_s"):
        return
    cases = document.data.get("cases")
    for i, case in enumerate(cases if isinstance(cases, list) else []):
        inner = case
        for parent in path[:-1]:
            inner = inner.get(parent) if isinstance(inner, dict) else None
        if isinstance(inner, dict) and path[-1] in inner:
            del inner[path[-1]]
            forget(document, {("cases", i, *path)})


def remove_parameters(
    document: Document, prefix: DataPath, block: dict[str, Any], names: Collection[str]
) -> None:
    """Remove parameters from the keys `fixed`, `grid` and `zip` of a block.

    Args:
        prefix: path of the block, empty for the top level.
        block: data of the block, which is a case or the top level of the file.
    """
    for axis in AXES:
        section = block.get(axis)
        if isinstance(section, dict) and not section.keys().isdisjoint(names):
            block[axis] = {k: v for k, v in section.items() if k not in names}
            forget(document, {(*prefix, axis, name) for name in names})


def forget(document: Document, paths: set[DataPath]) -> None:
    """Remove the recorded positions of the values at some paths, and of all values inside them.

    Error messages use the recorded positions (file, line and column) of keys and values.

    Args:
        paths: the paths. All have the same length.
    """
    length = len(next(iter(paths), ()))
    for table in (document.positions, document.keys):
        for known in [path for path in table if path[:length] in paths]:
            del table[known]
