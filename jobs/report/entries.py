"""The runs that a table can show, and the values that tell them apart, in the sweep's order."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jobs.errors import TableError, nearest
from jobs.observation import Observation, TaskState
from jobs.record import Record
from jobs.run import Run, varying
from jobs.status import Status
from jobs.sweep.benchmarks import NoBenchmark, load_benchmark, short_name
from jobs.sweep.conditions import Condition, ConditionError
from jobs.sweep.schema import PSEUDO, Plot, Table

Key = tuple[Any, ...]
Order = dict[str, dict[Any, int]]  # of each dimension, its values, numbered


@dataclass(frozen=True, slots=True)
class Entry:
    """One run's repeat on one kind of device, as a table counts it."""

    run: Run
    repeat: int
    device: str
    state: Status
    record: Record | None
    detail: str = ""  # why there is no record


def entries(observation: Observation) -> list[Entry]:
    """Every (run, repeat) on every kind of device that measured any of them.

    Where a folder holds records of several kinds, each kind has its own cells: the latest ok
    attempt there, else the latest, else `missing`.
    """
    best: dict[tuple[str, int, str], Record] = {}
    for record in observation.records:
        key = (record.run, record.repeat, record.device)
        if record.status == "ok" or key not in best or best[key].status != "ok":
            best[key] = record
    # A kind on which nothing could run at all is no kind that was measured.
    measured = {r.device: None for r in best.values() if r.status != "unsupported"}
    by_run: dict[str, set[str]] = {}
    for record in best.values():
        by_run.setdefault(record.run, set()).add(record.device)
    result = []
    for task in observation.tasks:
        mine = by_run.get(task.run.id, set())
        kinds = [d for d in measured if d in mine or _alike(d, task)]
        if not kinds:
            result.append(_observed(task, task.record.device if task.record else ""))
        for device in kinds:
            here = best.get((task.run.id, task.repeat, device))
            if here is not None:
                result.append(Entry(task.run, task.repeat, device, here.status, here))
            elif len(kinds) == 1 or task.record is None:
                result.append(_observed(task, device))
            else:
                result.append(Entry(task.run, task.repeat, device, Status.missing, None))
    return result


def _observed(task: TaskState, device: str) -> Entry:
    """A task as its folder has it, whatever the device."""
    return Entry(task.run, task.repeat, device, task.state, task.record, task.detail)


def _alike(device: str, task: TaskState) -> bool:
    """Whether a task could be measured on this kind of device: a GPU's, or a processor's."""
    on_cpu = not task.run.shape.gpus_per_node
    return device.startswith("cpu:") == on_cpu


def selected(
    observation: Observation, view: Table | Plot, chosen: list[Entry] | None = None
) -> list[Entry]:
    """The runs that a view shows: those of its benchmark for which its `where` holds.

    Raises:
        TableError: the view names a parameter that no run has, or cannot be compared so.
    """
    chosen = entries(observation) if chosen is None else chosen
    benchmark = view.benchmark or observation.manifests[-1].sweep.benchmark
    chosen = [entry for entry in chosen if entry.run.benchmark == short_name(benchmark)]
    if not chosen:
        return []
    dims = [name for name in dimensions(view) if name not in PSEUDO]
    chosen = _with_defaults(chosen, benchmark, dims)
    known = sorted(chosen[0].run.params)
    for name in dims:
        if name not in known:
            raise TableError(f"no run has a parameter {name!r}{nearest(name, known)}")
    if view.where:
        try:
            keep = Condition(view.where, known)
            chosen = [entry for entry in chosen if keep(entry.run.params)]
        except ConditionError as error:
            raise TableError(f"where: {error}") from error
    return chosen


def dimensions(view: Table | Plot) -> list[str]:
    """What a view says that its rows and columns, or its axes and lines, are of."""
    if isinstance(view, Plot):
        return [*view.facet, view.x, *view.series]
    return [*view.rows, *view.columns]


def _with_defaults(chosen: list[Entry], benchmark: str, dims: list[str]) -> list[Entry]:
    """The runs of a benchmark, all with the same parameters: one that is younger than a run had its
    default there."""
    names = dict.fromkeys(name for entry in chosen for name in entry.run.params)
    if names.keys() >= set(dims) and all(len(e.run.params) == len(names) for e in chosen):
        return chosen
    try:
        defaults = load_benchmark(benchmark).json_defaults
    except NoBenchmark as error:
        raise TableError(str(error)) from error
    names |= dict.fromkeys(name for name in dims if name in defaults)
    return [
        replace(
            entry,
            run=replace(
                entry.run, params={k: entry.run.params.get(k, defaults.get(k)) for k in names}
            ),
        )
        for entry in chosen
    ]


def declared(observation: Observation) -> Order:
    """Each parameter's values, numbered as the sweeps list them, the newest sweep first."""
    order: Order = {}
    for manifest in reversed(observation.manifests):
        for block in (manifest.sweep, *manifest.sweep.cases):
            listed = {name: [value] for name, value in block.fixed.items()}
            for name, values in (*listed.items(), *block.grid.items(), *block.zip.items()):
                places = order.setdefault(name, {})
                for value in values:
                    places.setdefault(value, len(places))
    return order


def in_order(keys: set[Key], dims: list[str], order: Order) -> list[Key]:
    """Keys in the order in which the sweep lists their values, whatever the runs' order was."""

    def rank(key: Key) -> list[tuple[int, float, str]]:
        ranks = []
        for name, value in zip(dims, key, strict=True):
            places = order.get(name, {})
            number = value if isinstance(value, (int, float)) else 0.0
            ranks.append((places.get(value, len(places)), number, str(value)))
        return ranks

    return sorted(keys, key=rank)


def coordinate(entry: Entry, name: str, phase: str = "", value: str = "") -> Any:
    """What a run has in one dimension of a table."""
    if name in PSEUDO:
        own = {"phase": phase, "value": value, "device": entry.device, "repeat": entry.repeat}
        return own[name]
    return entry.run.params[name]


def not_told_apart(chosen: list[Entry], dims: list[str]) -> list[str]:
    """What else is needed so that no two different runs share a cell, in the order to stand in."""
    needed: list[str] = []
    if len({entry.device for entry in chosen if entry.device}) > 1 and "device" not in dims:
        needed.append("device")
    groups: dict[Key, dict[str, Run]] = {}
    for entry in chosen:
        known = [name for name in (*dims, *needed) if name not in ("phase", "value")]
        key = tuple(coordinate(entry, name) for name in known)
        groups.setdefault(key, {})[entry.run.id] = entry.run
    for runs in groups.values():
        if len(runs) > 1:
            needed += [
                name for name in varying(list(runs.values())) if name not in (*dims, *needed)
            ]
    return needed[::-1]
