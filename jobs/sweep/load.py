"""Loads a sweep file.

    loaded = load_sweep(Path("sweeps/flash.yaml"), overrides=["seq_len=[128,256]"])

The sweep file is merged with its base file (which its key `base` names), with a cluster file, and
with the overrides from the command line. The result is checked. All errors are reported together,
each with its position.

The module `schema` declares the keys of a sweep file. The modules `check_schema`,
`check_parameters`, `check_slurm` and `check_views` check the values. The module `expand` creates
the runs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.errors import InputError, Position, Problem, nearest
from jobs.sweep.benchmarks import Benchmarks, NoBenchmark, load_benchmark, load_benchmarks
from jobs.sweep.check_parameters import check_parameters
from jobs.sweep.check_schema import validate_schema
from jobs.sweep.check_slurm import check_slurm
from jobs.sweep.check_views import check_views
from jobs.sweep.overrides import apply_override, forget, remove_parameters, repeated_overrides
from jobs.sweep.schema import AXES, Sweep
from jobs.sweep.stock_sweeps import sweep_file
from jobs.sweep.strict_yaml import DataPath, Document, decode, parse
from jobs.user_files import InvalidFile, invalid_path, read_bytes

MAX_BASES = 20  # files that a sweep file inherits from
CLUSTER_KEYS = ["slurm", "resources"]


@dataclass(frozen=True)
class LoadedSweep:
    """A validated sweep, its benchmarks and its parsed file.

    The parsed file is used to report errors with their file, line and column.
    """

    sweep: Sweep
    benchmarks: Benchmarks
    document: Document


def load_sweep(
    path: Path,
    overrides: list[str] | tuple[str, ...] = (),
    filter: str | None = None,
    cluster: Path | None = None,
) -> LoadedSweep:
    """Read and validate a sweep file.

    Args:
        path: path of the YAML file. If it does not exist, the stock sweep with this path is read.
            Stock sweeps, such as sweeps/flash.yaml, are installed with the project.
        overrides: `key=value` from the command line. A key is a parameter, a key of the sweep, or
            a dotted path such as slurm.partition. A list of values makes a parameter part of the
            grid.
        filter: a comparison, such as `seq_len <= 1024`. Runs that do not match it are left out.
        cluster: path of a cluster file with default values for `slurm` and `resources`, or None.

    Raises:
        InputError: if a file, an override or the filter is invalid. The error lists all problems
            with file, line and column.
    """
    problems: list[Problem] = []
    document = _read_sweep(path, problems)
    if cluster is not None:
        document = _merge(_read_cluster(cluster, problems), document)
    benchmarks = _apply_overrides(document, overrides, problems)
    if filter is not None:
        document.data["filter"] = filter
        document.positions[("filter",)] = Position("--where")
    unread = {problem.position for problem in problems}
    found: list[Problem] = []
    sweep = validate_schema(document, found)
    found += check_slurm(document)
    if benchmarks is not None:
        found += check_parameters(document, benchmarks) + check_views(document, benchmarks)
    # A value that cannot be parsed is None in the data, so later checks may reject it again. Report
    # only the parsing error.
    problems += [problem for problem in found if problem.position not in unread]
    if problems:
        raise InputError(problems)
    assert sweep is not None and benchmarks is not None
    return LoadedSweep(sweep, benchmarks, document)


# ---- reading and merging -------------------------------------------------------------------------


def _read_sweep(path: Path, problems: list[Problem]) -> Document:
    """Read a sweep file, and merge it with its base file.

    Raises:
        InputError: if the file cannot be read or is empty.
    """
    document = _read(sweep_file(path), problems, ())
    if not isinstance(document.data, dict):
        raise InputError(problems)
    if not document.data:
        empty = "the file is empty; the keys name and benchmark are required"
        raise InputError(problems or [Problem(document.at(()), empty)])
    if "filter" in document.data:
        where = document.at_key(("filter",))
        problems.append(
            Problem(where, "'filter' is not a key of a sweep file; use the option --where")
        )
        del document.data["filter"]
    return document


def _apply_overrides(
    document: Document, overrides: list[str] | tuple[str, ...], problems: list[Problem]
) -> Benchmarks | None:
    """Apply the overrides from the command line to a sweep file, and load its benchmarks.

    Returns:
        The benchmarks. None if they cannot be loaded.
    """
    problems += repeated_overrides(overrides)
    # The other overrides need the parameters of the benchmarks, so load the benchmarks first.
    first = [argument for argument in overrides if argument.startswith("benchmark=")]
    for argument in first:
        apply_override(document, argument, [], problems)
    benchmarks = _benchmarks(document, problems)
    parameters = benchmarks.fields if benchmarks else []
    for argument in overrides:
        if argument not in first:
            apply_override(document, argument, parameters, problems)
    return benchmarks


def _read(path: Path, problems: list[Problem], above: tuple[str, ...]) -> Document:
    """Read a sweep file or cluster file, and merge it with its base file.

    The base file is the file that the key `base` names. The base file may itself have a base file.

    Args:
        path: path of the file.
        problems: list to which errors are added.
        above: resolved paths of the files that inherit from this file, to detect cycles.

    Returns:
        The merged file. Its `data` is None if the file cannot be read.
    """
    source = str(path)
    try:
        text, wrong = decode(read_bytes(path), source)
    except InvalidFile as error:
        problems.append(Problem(Position(source), f"cannot be read: {error}"))
        return Document(source=source)
    if wrong:
        problems.append(wrong)
        return Document(source=source)
    document = parse(text, source)
    problems.extend(document.problems)
    if document.data is None and not document.problems:
        document.data = {}
    if not isinstance(document.data, dict):
        if not document.problems:
            what = f"the file must be a mapping of keys to values, got {_kind(document.data)}"
            problems.append(Problem(document.at(()), what))
        return document
    return _inherit(document, path, problems, above) if "base" in document.data else document


def _kind(data: Any) -> str:
    """Describe data that is no mapping. Its content is not shown, because it may be a secret."""
    kinds = {list: "a list", dict: "a mapping", str: "a string", bool: "a boolean"}
    return kinds.get(type(data), "null" if data is None else "a number")


def _inherit(
    document: Document, path: Path, problems: list[Problem], above: tuple[str, ...]
) -> Document:
    """Merge a sweep file with its base file, which is the file that the key `base` names.

    Values of the sweep file replace those of the base file. If the base file cannot be read, the
    sweep file is returned without the key `base`.

    Args:
        document: the parsed sweep file.
        path: path of the sweep file.
        problems: list to which errors are added.
        above: resolved paths of the files that inherit from the sweep file, to detect cycles.
    """
    base = document.data.pop("base")
    where = document.at(("base",))
    if not isinstance(base, str):
        problems.append(Problem(where, f"base must be a file name, got {_kind(base)}"))
        return document
    base_path = path.parent / base
    wrong = invalid_path(base)
    if wrong:
        problems.append(Problem(where, f"base: {wrong}"))
        return document
    if not os.path.exists(base_path):
        problems.append(
            Problem(
                where,
                f"base: there is no file {str(base_path)!r}; "
                "a relative path starts at the folder of this file",
            )
        )
        return document
    chain = (*above, os.path.realpath(path))
    if os.path.realpath(base_path) in chain:
        names = " -> ".join(Path(name).name for name in (*chain, str(base_path)))
        problems.append(Problem(where, f"base: a file must not inherit from itself, got {names}"))
        return document
    if len(chain) > MAX_BASES:
        problems.append(Problem(where, f"base: a sweep must have at most {MAX_BASES} base files"))
        return document
    inherited = _read(base_path, problems, chain)
    return _merge(inherited, document) if isinstance(inherited.data, dict) else document


def _read_cluster(path: Path, problems: list[Problem]) -> Document:
    """Read a cluster file. It may contain only the keys `slurm` and `resources`.

    Each other key is reported as an error and removed.
    """
    document = _read(path, problems, ())
    if not isinstance(document.data, dict):
        return Document({}, document.source)
    for key in list(document.data):
        if key not in CLUSTER_KEYS:
            what = f"{key!r} is not a key of a cluster file{nearest(key, CLUSTER_KEYS)}"
            problems.append(Problem(document.at_key((key,)), what))
            del document.data[key]
    return document


def _merge(under: Document, over: Document) -> Document:
    """Merge two parsed files. Values of `over` replace values of `under`.

    If both files have a mapping under the same key, such as `resources`, the two mappings are
    merged key by key. Any other value is replaced as a whole. If `over` sets a parameter in
    `fixed`, `grid` or `zip`, the parameter is first removed from all three keys of `under`.

    Returns:
        The merged file, as a new document.
    """
    found = [*under.problems, *over.problems]
    result = Document(dict(under.data), over.source, dict(under.positions), dict(under.keys), found)
    for axis in AXES:
        above = over.data.get(axis)
        if isinstance(above, dict):
            remove_parameters(result, (), result.data, above)
    for key, value in over.data.items():
        below = result.data.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            result.data[key] = {**below, **value}
            forget(result, {(key, inner) for inner in value})
        else:
            result.data[key] = value
            forget(result, {(key,)})
    result.positions.update(over.positions)
    result.keys.update(over.keys)
    return result


def _benchmarks(document: Document, problems: list[Problem]) -> Benchmarks | None:
    """Load the benchmarks of a sweep file: the default benchmark and those of the cases.

    Args:
        document: the parsed sweep file.
        problems: list to which an error is added for each benchmark that cannot be loaded.

    Returns:
        The benchmarks. None if one of them cannot be loaded, or if the file has no default
        benchmark.
    """
    cases = document.data.get("cases")
    places: list[tuple[DataPath, Any]] = [(("benchmark",), document.data.get("benchmark"))]
    for i, case in enumerate(cases if isinstance(cases, list) else []):
        if isinstance(case, dict):
            places.append((("cases", i, "benchmark"), case.get("benchmark")))
    problems_before = len(problems)
    names: dict[str, None] = {}
    for path, name in places:
        if not isinstance(name, str) or name in names:
            continue  # the schema check reports a name of the wrong type
        names[name] = None
        try:
            load_benchmark(name)
        except NoBenchmark as error:
            problems.append(Problem(document.at(path), str(error)))
    own = document.data.get("benchmark")
    if len(problems) > problems_before or not isinstance(own, str):
        return None
    return load_benchmarks(own, names)
