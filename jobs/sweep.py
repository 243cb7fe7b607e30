"""A sweep file -> `Sweep`: what to measure, validated once, every error at once with its place.

    loaded = load_sweep(Path("sweeps/flash.yaml"), overrides=["seq_len=[128,256]"])

`jobs.schema` declares the keys, `jobs.validate` checks them, `jobs.expand` makes the runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jobs.benchmarks import Benchmark, load_benchmark
from jobs.conditions import nearest
from jobs.schema import AXES, Sweep
from jobs.strict_yaml import Document, InputError, Position, Problem, parse
from jobs.strict_yaml import Path as DataPath
from jobs.validate import (
    check_conditions,
    check_params,
    check_references,
    check_views,
    validate_schema,
)


@dataclass(frozen=True)
class LoadedSweep:
    """A validated sweep, its benchmark, and the places its values came from."""

    sweep: Sweep
    benchmark: Benchmark
    document: Document


def load_sweep(
    path: Path,
    overrides: list[str] | tuple[str, ...] = (),
    filter: str | None = None,
    cluster: Path | None = None,
) -> LoadedSweep:
    """Read and validate a sweep file.

    Args:
        path: the YAML file.
        overrides: `key=value` from the command line; a key is a parameter, a key of the sweep, or
            a dotted path such as slurm.partition. A list makes a parameter part of the grid.
        filter: keep only the runs for which this comparison holds.
        cluster: a cluster.yaml whose `slurm` and `resources` are defaults beneath the sweep's.

    Raises:
        InputError: every problem, each with file, line and column.
    """
    problems: list[Problem] = []
    document = _read(path, problems, ())
    if not isinstance(document.data, dict):
        if not problems:
            problems.append(Problem(document.at(()), "expected a mapping with name, benchmark, …"))
        raise InputError(problems)
    if cluster is not None:
        document = _merge(_read_cluster(cluster, problems), document)
    benchmark = _benchmark(document, problems)
    for argument in overrides:
        _override(document, argument, benchmark, problems)
    if filter is not None:
        document.data["filter"] = filter
        document.positions[("filter",)] = Position("--filter")
    sweep = validate_schema(document, problems)
    if benchmark is not None:
        check_params(document, benchmark, problems)
        if sweep is not None:
            check_conditions(sweep, document, benchmark, problems)
            check_views(sweep, document, benchmark, problems)
            check_references(sweep, document, benchmark, problems)
    if problems:
        raise InputError(problems)
    assert sweep is not None and benchmark is not None
    return LoadedSweep(sweep, benchmark, document)


# ---- reading and merging -------------------------------------------------------------------------


def _read(path: Path, problems: list[Problem], seen: tuple[Path, ...]) -> Document:
    """One file with everything it inherits through `base`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        problems.append(Problem(Position(str(path)), f"cannot be read: {reason}"))
        return Document(source=str(path))
    document = parse(text, str(path))
    problems.extend(document.problems)
    if not isinstance(document.data, dict) or "base" not in document.data:
        return document
    base = document.data.pop("base")
    where = document.at(("base",))
    if not isinstance(base, str):
        problems.append(Problem(where, f"base: given {base!r}, expected a file name"))
        return document
    base_path = path.parent / base
    chain = (*seen, path.resolve())
    if base_path.resolve() in chain:
        names = " -> ".join(p.name for p in (*chain, base_path))
        problems.append(Problem(where, f"base: a circle: {names}"))
        return document
    if not base_path.is_file():
        problems.append(Problem(where, f"base: there is no file {str(base_path)!r}"))
        return document
    inherited = _read(base_path, problems, chain)
    return _merge(inherited, document) if isinstance(inherited.data, dict) else document


def _read_cluster(path: Path, problems: list[Problem]) -> Document:
    document = _read(path, problems, ())
    data = document.data if isinstance(document.data, dict) else {}
    for key in list(data):
        if key not in ("slurm", "resources"):
            problems.append(
                Problem(
                    document.at_key((key,)),
                    f"{key!r} does not belong in a cluster file{nearest(key, ['slurm', 'resources'])}",
                )
            )
            del data[key]
    document.data = data
    return document


def _merge(under: Document, over: Document) -> Document:
    """`over` on top of `under`: mappings key by key, everything else replaced.

    A parameter that `over` sets in one of fixed, grid and zip leaves the other two.
    """
    result = Document(dict(under.data or {}), over.source, dict(under.positions), dict(under.keys))
    set_above = {
        key for axis in AXES if isinstance(over.data.get(axis), dict) for key in over.data[axis]
    }
    for axis in AXES:
        if isinstance(result.data.get(axis), dict):
            result.data[axis] = {k: v for k, v in result.data[axis].items() if k not in set_above}
    for key, value in over.data.items():
        below = result.data.get(key)
        if isinstance(value, dict) and isinstance(below, dict):
            result.data[key] = {**below, **value}
            for inner in value:
                _forget(result, (key, inner))
        else:
            result.data[key] = value
            _forget(result, (key,))
    result.positions.update(over.positions)
    result.keys.update(over.keys)
    return result


def _forget(document: Document, path: DataPath) -> None:
    for table in (document.positions, document.keys):
        for known in [p for p in table if p[: len(path)] == path]:
            del table[known]


def _override(
    document: Document, argument: str, benchmark: Benchmark | None, problems: list[Problem]
) -> None:
    where = Position(f"command line: {argument}")
    key, equals, text = argument.partition("=")
    if not equals or not key:
        problems.append(Problem(where, "expected key=value, for example seq_len=[128,256]"))
        return
    value_document = parse(text, where.source) if text.strip() else Document(None)
    problems.extend(Problem(where, problem.message) for problem in value_document.problems)
    value = value_document.data
    data = document.data
    if benchmark is not None and key in benchmark.params.model_fields:
        section = "grid" if isinstance(value, list) else "fixed"
        blocks = [data, *(c for c in data.get("cases") or [] if isinstance(c, dict))]
        for block in blocks:
            for axis in AXES:
                if isinstance(block.get(axis), dict) and key in block[axis]:
                    if axis == "grid" == section:  # keeps its place in the product's order
                        continue
                    block[axis] = {k: v for k, v in block[axis].items() if k != key}
        for block in blocks:
            inherits = block is not data and key not in (block.get(section) or {})
            if inherits:
                continue
            block[section] = {**(block.get(section) or {}), key: value}
        path: DataPath = (section, key)
        if document.data.get("cases"):
            for i, block in enumerate(data["cases"]):
                if isinstance(block, dict) and key in (block.get(section) or {}):
                    _forget(document, ("cases", i, section, key))
                    document.positions[("cases", i, section, key)] = where
    else:
        *parents, last = key.split(".")
        known = sorted({*Sweep.model_fields, *(benchmark.fields if benchmark else [])} - {"filter"})
        if (parents or [last])[0] not in Sweep.model_fields:
            given = (parents or [last])[0]
            what = "neither a parameter nor a key of a sweep"
            problems.append(Problem(where, f"{given!r} is {what}{nearest(given, known)}"))
            return
        target = data
        for parent in parents:
            if not isinstance(target.get(parent), dict):
                target[parent] = {}
            target = target[parent] = dict(target[parent])
        target[last] = value
        path = tuple(key.split("."))
    _forget(document, path)
    document.positions[path] = document.keys[path] = where


def _benchmark(document: Document, problems: list[Problem]) -> Benchmark | None:
    name = document.data.get("benchmark")
    if not isinstance(name, str):
        return None  # the schema reports it
    try:
        return load_benchmark(name)
    except LookupError as error:
        problems.append(Problem(document.at(("benchmark",)), str(error)))
        return None
