"""Loads a sweep file: load_sweep(Path("sweeps/flash.yaml"), overrides=["seq_len=[128,256]"]).

The file is merged with its base file, a cluster file and the overrides of the command line. Then
the models of the module `schema` check its types, and `checks` the rest. All errors are reported
together.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jobs.errors import ENOUGH, InputError, Position, Problem, nearest
from jobs.sweep.benchmarks import Benchmark, Benchmarks, NoBenchmark, load_benchmark, short_name
from jobs.sweep.checks import sweep_faults
from jobs.sweep.messages import problems_of
from jobs.sweep.overrides import apply_override, remove_parameters, repeated_overrides
from jobs.sweep.schema import AXES, Sweep
from jobs.sweep.stock_sweeps import sweep_file
from jobs.sweep.strict_yaml import DataPath, Document, entries, parse
from jobs.user_files import invalid_path

CLUSTER_KEYS = ["slurm", "resources"]


@dataclass(frozen=True)
class LoadedSweep:
    """A validated sweep, its benchmarks and its parsed file, which has the positions of errors."""

    sweep: Sweep
    benchmarks: Benchmarks
    document: Document


def load_sweep(
    path: Path,
    overrides: list[str] | tuple[str, ...] = (),
    filter: str | None = None,
    cluster: Path | None = None,
    rounds: str | None = None,
) -> LoadedSweep:
    """Read and validate a sweep file, or the stock sweep with this path.

    Args:
        overrides: `key=value` from the command line, see `apply_override`.
        filter: a condition, such as `seq_len <= 1024`. Other runs are left out.
        cluster: path of a cluster file with default values for `slurm` and `resources`.
        rounds: value of `blocks.rounds`, also if an override sets it.

    Raises:
        InputError: with all errors in the files, the overrides and the filter.
    """
    document = _read(sweep_file(path))
    if "filter" in document.data:
        del document.data["filter"]
        what = "'filter' is not a key of a sweep file; use the option --where"
        document.refuse(what, ("filter",), key=True)
    if cluster is not None:
        document = _merge(_read_cluster(cluster), document)
    benchmarks = _apply_overrides(document, overrides)
    if rounds is not None:
        apply_override(document, f"blocks.rounds={rounds}", [])
    if filter is not None:
        document.data["filter"] = filter
        document.place(("filter",), Position("--where"))
    # A value that cannot be parsed is None in the data. Report only the parsing error.
    unread = {problem.position for problem in document.problems}
    found: list[Problem] = []
    try:
        sweep = Sweep.model_validate(document.data)
    except ValidationError as error:
        found = problems_of(error, document.data, document.at, Sweep)
    faults = () if benchmarks is None else sweep_faults(document.data, benchmarks)
    for fault in islice(faults, ENOUGH):
        found.append(Problem(document.at(fault.path, fault.at_key), fault.what))
    document.problems += [problem for problem in found if problem.position not in unread]
    if document.problems:
        raise InputError(document.problems)
    assert benchmarks is not None
    return LoadedSweep(sweep, benchmarks, document)


def _apply_overrides(
    document: Document, overrides: list[str] | tuple[str, ...]
) -> Benchmarks | None:
    """Apply the overrides to a sweep file. Return its benchmarks, or None on an error in them."""
    document.problems += repeated_overrides(overrides)
    # The other overrides need the parameters of the benchmarks, so load the benchmarks first.
    first = [argument for argument in overrides if argument.startswith("benchmark=")]
    for argument in first:
        apply_override(document, argument, [])
    benchmarks = load_benchmarks(document)
    parameters = benchmarks.fields if benchmarks else []
    for argument in overrides:
        if argument not in first:
            apply_override(document, argument, parameters)
    return benchmarks


def load_benchmarks(document: Document) -> Benchmarks | None:
    """Load the benchmarks of a sweep file and of its cases.

    If that is impossible, return None, and add the errors to those of the file.
    """
    own = document.data.get("benchmark")
    places: dict[Any, DataPath] = {own: ("benchmark",)} if isinstance(own, str) else {}
    for i, case in entries(document.data.get("cases")):
        if isinstance(case.get("benchmark"), str):
            places.setdefault(case["benchmark"], ("cases", i, "benchmark"))
    before = len(document.problems)
    found: dict[str, Benchmark] = {}
    for name, path in places.items():
        try:
            found[short_name(name)] = load_benchmark(name)
        except NoBenchmark as error:
            document.refuse(str(error), path)
    is_wrong = len(document.problems) > before or not isinstance(own, str)
    return None if is_wrong else Benchmarks(found[short_name(own)], found)


def _read(path: Path, above: tuple[str, ...] = ()) -> Document:
    """Read a file, and merge it with its base file.

    `above` has the resolved paths of the files that inherit from this file. Raises InputError if
    one of the files is no mapping: the errors that follow, such as a missing benchmark, mislead.
    """
    try:
        document = parse(path.read_bytes(), str(path))
    except (OSError, ValueError) as error:
        what = f"cannot be read: {getattr(error, 'strerror', error)}"
        raise InputError([Problem(Position(str(path)), what)]) from None
    if document.data is None and not document.problems:
        document.data = {}
    if not isinstance(document.data, dict) or (document.problems and not document.data):
        if not document.problems:  # the content is not shown, because it may be a secret
            document.refuse(f"the file must be a mapping, got {type(document.data).__name__}")
        raise InputError(document.problems)
    if "base" not in document.data:
        return document
    chain = (*above, os.path.realpath(path))
    return _merge(_read(_base(document, path, chain), chain), document)


def _base(document: Document, path: Path, chain: tuple[str, ...]) -> Path:
    """Remove the key `base` from a file. Return the path of the base file, or raise InputError."""
    base = document.data.pop("base")
    if not isinstance(base, str):
        wrong = f"base must be a file name, got {type(base).__name__}"
    elif invalid := invalid_path(base):
        wrong = f"base: {invalid}"
    else:
        try:
            found = sweep_file(Path(base), path.parent)
        except InputError as error:
            wrong = f"base: {error}"
        else:
            if os.path.realpath(found) not in chain:
                return found
            names = " -> ".join(Path(name).name for name in (*chain, base))
            wrong = f"base: a file must not inherit from itself, got {names}"
    document.refuse(wrong, ("base",))
    raise InputError(document.problems)


def _read_cluster(path: Path) -> Document:
    """Read a cluster file. Report and remove other keys than CLUSTER_KEYS."""
    document = _read(path)
    for key in list(document.data):
        if key not in CLUSTER_KEYS:
            what = f"{key!r} is not a key of a cluster file{nearest(key, CLUSTER_KEYS)}"
            document.refuse(what, (key,), key=True)
            del document.data[key]
    return document


def _merge(under: Document, over: Document) -> Document:
    """Merge two parsed files. Values of `over`, a mapping, replace values of `under`.

    Mappings under the same key, such as `resources`, are merged key by key. A parameter that `over`
    sets in `fixed`, `grid` or `zip` is first removed from all three keys of `under`.
    """
    data = under.data
    replaced: set[DataPath] = set()
    for axis in AXES:
        if isinstance(over.data.get(axis), dict):
            remove_parameters(data, over.data[axis])
    for key, value in over.data.items():
        if isinstance(value, dict) and isinstance(data.get(key), dict):
            data[key] |= value
            replaced |= {(key, inner) for inner in value}
        else:
            data[key] = value
            replaced.add((key,))
    kept = {path: at for path, at in under.places.items() if not replaced & {path[:1], path[:2]}}
    return Document(data, over.source, kept | over.places, under.problems + over.problems)
