"""Runs and records -> tables: every run of the sweep has a cell, whatever became of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd

from jobs.benchmarks import load_benchmark
from jobs.conditions import Condition
from jobs.expand import Run, varying
from jobs.record import Record
from jobs.schema import PSEUDO, Plot, Table
from jobs.status import Observation, TaskState
from jobs.values import (
    Value,
    phases,
    samples_of,
    shown,
    shown_failure,
    spread,
    statistic,
    values_of,
)

Key = tuple[Any, ...]
MAX_REASONS = 5


@dataclass(slots=True)
class Cell:
    """One place of a table: the samples of its repeats, or what became of them."""

    value: Value
    samples: list[np.ndarray] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def number(self, name: str) -> float | None:
        return statistic(np.concatenate(self.samples), name) if self.samples else None

    def text(self, name: str) -> str:
        """The number, or why there is none; where repeats differ, how many are behind it."""
        number = self.number(name)
        if number is None:
            return ", ".join(dict.fromkeys([*self.texts, *self.failures]))
        text = shown(number)
        if name == "mean_std":
            text += f" ± {shown(statistic(np.concatenate(self.samples), 'std'))}"
        if self.failures:
            ok, total = len(self.samples), len(self.samples) + len(self.failures)
            text += f" ({ok} of {total} repeats; {', '.join(dict.fromkeys(self.failures))})"
        return text


@dataclass(frozen=True, slots=True)
class Entry:
    """One run's repeat on one kind of device, as a table counts it."""

    run: Run
    repeat: int
    device: str
    state: str
    record: Record | None
    detail: str = ""  # why there is no record


@dataclass(frozen=True)
class Filled:
    """A table or plot with its cells: rows and columns by their names' values, in sweep order."""

    view: Table | Plot
    values: list[Value]
    rows: list[str]
    columns: list[str]
    row_keys: list[Key]
    column_keys: list[Key]
    cells: dict[tuple[Key, Key], Cell]
    notes: list[str]


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
            device = task.record.device if task.record else ""
            result.append(
                Entry(task.run, task.repeat, device, task.state, task.record, task.detail)
            )
            continue
        for device in kinds:
            here = best.get((task.run.id, task.repeat, device))
            if here is not None:
                result.append(Entry(task.run, task.repeat, device, here.status, here))
            elif len(kinds) == 1 or task.record is None:
                result.append(
                    Entry(task.run, task.repeat, device, task.state, task.record, task.detail)
                )
            else:
                result.append(Entry(task.run, task.repeat, device, "missing", None))
    return result


def _alike(device: str, task: TaskState) -> bool:
    """Whether a task could be measured on this kind of device: a GPU's, or a processor's."""
    on_cpu = not task.run.shape.gpus_per_node
    return device.startswith("cpu:") == on_cpu


def fill(observation: Observation, view: Table | Plot, chosen: list[Entry] | None = None) -> Filled:
    """Put every run of the folder in its place in a view."""
    chosen = _of_one_benchmark(observation, entries(observation) if chosen is None else chosen)
    if view.where:
        keep = Condition(view.where, sorted({k for entry in chosen for k in entry.run.params}))
        chosen = [entry for entry in chosen if keep(entry.run.params)]
    values = values_of(view)
    rows, columns = _dims(view, chosen)
    wanted = _phases(chosen, view, "phase" in rows)
    every = list(dict.fromkeys(phase for of_value in wanted.values() for phase in of_value))
    if len([phase for phase in every if phase]) > 1 and "phase" not in (*rows, *columns):
        columns.insert(0, "phase")
    if len(values) > 1 and "value" not in (*rows, *columns):
        columns.append("value")
    for name in _not_told_apart(chosen, [*rows, *columns]):
        rows.insert(0, name)
    cells: dict[tuple[Key, Key], Cell] = {}
    for entry in chosen:
        for value in values:
            for phase in wanted[value.name]:
                row = tuple(_part(entry, name, phase, value.name) for name in rows)
                column = tuple(_part(entry, name, phase, value.name) for name in columns)
                _add(cells.setdefault((row, column), Cell(value)), entry, phase)
    order = _declared(observation)
    order["phase"] = {phase: i for i, phase in enumerate(every)}
    order["value"] = {value.name: i for i, value in enumerate(values)}
    row_keys = _sorted({row for row, _ in cells}, rows, order)
    column_keys = _sorted({column for _, column in cells}, columns, order)
    notes = _notes(chosen, view, list(cells.values()))
    return Filled(view, values, rows, columns, row_keys, column_keys, cells, notes)


def _dims(view: Table | Plot, chosen: list[Entry]) -> tuple[list[str], list[str]]:
    """What the view says stands in rows and columns; where it says nothing, what was swept."""
    if isinstance(view, Plot):
        return [*view.facet, view.x], list(view.series)
    if view.rows or view.columns:
        return list(view.rows), list(view.columns)
    swept = varying([entry.run for entry in chosen])
    columns = [name for name in swept if name in ("implementation", "backend")]
    return [name for name in swept if name not in columns], columns


def _add(cell: Cell, entry: Entry, phase: str) -> None:
    """Put one run's value into its cell, or what became of the run."""
    if entry.state != "ok" or entry.record is None:
        cell.failures.append(shown_failure(entry.record, entry.state))
        return
    samples = samples_of(entry.record, cell.value, phase)
    if samples is None:
        cell.texts.append("–")
    elif isinstance(samples, str):
        cell.texts.append(samples)
    else:
        cell.samples.append(samples)


def _of_one_benchmark(observation: Observation, chosen: list[Entry]) -> list[Entry]:
    """The runs that the views can show: of the last sweep's benchmark. A parameter that is younger
    than a run had its default there."""
    newest = observation.manifests[-1]
    benchmark = next(iter(newest.runs.values())).benchmark
    chosen = [entry for entry in chosen if entry.run.benchmark == benchmark]
    names = dict.fromkeys(name for entry in chosen for name in entry.run.params)
    if all(len(entry.run.params) == len(names) for entry in chosen):
        return chosen
    defaults = load_benchmark(newest.sweep.benchmark).json_defaults
    return [
        replace(
            entry,
            run=replace(
                entry.run, params={k: entry.run.params.get(k, defaults.get(k)) for k in names}
            ),
        )
        for entry in chosen
    ]


def _declared(observation: Observation) -> dict[str, dict[Any, int]]:
    """Each parameter's values, numbered as the sweeps list them, the newest sweep first."""
    order: dict[str, dict[Any, int]] = {}
    for manifest in reversed(observation.manifests):
        for block in (manifest.sweep, *manifest.sweep.cases):
            listed = {name: [value] for name, value in block.fixed.items()}
            for name, values in (*listed.items(), *block.grid.items(), *block.zip.items()):
                places = order.setdefault(name, {})
                for value in values:
                    places.setdefault(value, len(places))
    return order


def _sorted(keys: set[Key], dims: list[str], order: dict[str, dict[Any, int]]) -> list[Key]:
    """Keys in the order in which the sweep lists their values, whatever the runs' order was."""

    def rank(key: Key) -> list[tuple[int, float, str]]:
        ranks = []
        for name, value in zip(dims, key, strict=True):
            places = order.get(name, {})
            number = value if isinstance(value, (int, float)) else 0.0
            ranks.append((places.get(value, len(places)), number, str(value)))
        return ranks

    return sorted(keys, key=rank)


def _part(entry: Entry, name: str, phase: str, value: str) -> Any:
    """What a run has in one dimension of a table."""
    if name in PSEUDO:
        own = {"phase": phase, "value": value, "device": entry.device, "repeat": entry.repeat}
        return own[name]
    return entry.run.params[name]


def _phases(chosen: list[Entry], view: Table | Plot, in_rows: bool) -> dict[str, list[str]]:
    """By value, the phases to show: as the view says, else all that were measured. What has no
    phase of its own stands in the row of every phase, but in one column."""
    given = [view.phase] if isinstance(view.phase, str) else list(view.phase or [])
    measured = [e.record.measurements for e in chosen if e.record and e.record.measurements]
    seen: dict[str, list[str]] = {}
    for value in values_of(view):
        found = dict.fromkeys(phase for m in measured for phase in phases(m, value.name))
        phaseless = list(found) == [""]
        seen[value.name] = list(found) if phaseless or not given else given
    every = list(dict.fromkeys(phase for of_value in seen.values() for phase in of_value if phase))
    return {
        name: every if in_rows and found in ([], [""]) and every else found or [""]
        for name, found in seen.items()
    }


def _not_told_apart(chosen: list[Entry], dims: list[str]) -> list[str]:
    """What else is needed so that no two different runs share a cell."""
    needed: list[str] = []
    if len({entry.device for entry in chosen if entry.device}) > 1 and "device" not in dims:
        needed.append("device")
    groups: dict[Key, dict[str, Run]] = {}
    for entry in chosen:
        known = [name for name in (*dims, *needed) if name not in ("phase", "value")]
        key = tuple(_part(entry, name, "", "") for name in known)
        groups.setdefault(key, {})[entry.run.id] = entry.run
    for runs in groups.values():
        if len(runs) > 1:
            needed += [
                name for name in varying(list(runs.values())) if name not in (*dims, *needed)
            ]
    return needed


def _notes(chosen: list[Entry], view: Table | Plot, cells: list[Cell]) -> list[str]:
    devices = ", ".join(dict.fromkeys(entry.device for entry in chosen if entry.device))
    several = any(
        entry.record is not None
        and entry.record.measurements is not None
        and any(
            len(s) and not isinstance(s[0], (int, float))
            for s in entry.record.measurements.samples_ms.values()
        )
        for entry in chosen
    )
    parts = [devices] if devices else []
    sampled = [cell for cell in cells if cell.samples and cell.value.is_sampled]
    measured = [np.concatenate(cell.samples) for cell in sampled]
    counts = [len(samples) for samples in measured]
    spreads = [spread(samples) for samples in measured if len(samples) > 1]
    if counts and max(counts) > 1:
        name = {"mean_std": "mean ± standard deviation"}.get(view.statistic, view.statistic)
        low, high = min(counts), max(counts)
        parts.append(f"{name} of {low}{f' to {high}' if high > low else ''} samples")
        if several:
            parts.append("the slowest rank's")
        middle, worst = np.median(spreads), max(spreads)
        parts.append(
            f"interquartile range {middle:.1%} of the median in the middle case, "
            f"{worst:.1%} in the worst"
        )
    # Why there is no record: a worker that died says nothing, its job's state does.
    told = Counter(
        f"{entry.state}: {entry.detail}" for entry in chosen if not entry.record and entry.detail
    )
    reasons = [f"{reason} ({count} runs)" for reason, count in told.most_common(MAX_REASONS)]
    if len(told) > MAX_REASONS:
        reasons.append(f"and {len(told) - MAX_REASONS} more reasons (python -m jobs status)")
    return [*(["; ".join(parts)] if parts else []), *reasons]


def frame(filled: Filled) -> pd.DataFrame:
    """The table as text cells; with a baseline, each column is followed by its speed-up."""
    view = filled.view
    name = view.statistic
    data: dict[str, list[str]] = {}
    for i, dim in enumerate(filled.rows):
        data[_unique(dim, data)] = [_told(filled, dim, key[i]) for key in filled.row_keys]
    baseline = view.baseline if isinstance(view, Table) else None
    for column in filled.column_keys:
        header = _header(filled, column)
        cells = [filled.cells.get((row, column)) for row in filled.row_keys]
        data[_unique(header, data)] = [cell.text(name) if cell else "" for cell in cells]
        if baseline:
            base = tuple(
                baseline.get(dim, part) for dim, part in zip(filled.columns, column, strict=True)
            )
            if base != column:
                against = " ".join(_plain(value) for value in baseline.values())
                data[_unique(f"{header} vs {against}", data)] = [
                    _speedup(filled, row, column, base) for row in filled.row_keys
                ]
    return pd.DataFrame(data)


def _header(filled: Filled, column: Key) -> str:
    told = [
        _told(filled, dim, part)
        for dim, part in zip(filled.columns, column, strict=True)
        if part != ""
    ]
    return " ".join(told) or filled.values[0].label


def _told(filled: Filled, dim: str, part: Any) -> str:
    """One part of a row's or column's key as a reader sees it."""
    if dim == "value":
        return next(value.header for value in filled.values if value.name == part)
    return _plain(part)


def _unique(header: str, data: Iterable[str]) -> str:
    taken = set(data)
    while header in taken:
        header += " "
    return header


def _plain(value: Any) -> str:
    """A value as a sweep file writes it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _speedup(filled: Filled, row: Key, column: Key, base: Key) -> str:
    """How many times better than the baseline; what became of either where there is no number."""
    name = {"mean_std": "mean"}.get(filled.view.statistic, filled.view.statistic)
    cell, reference = filled.cells.get((row, column)), filled.cells.get((row, base))
    if cell is None:
        return ""
    if reference is None:
        return "no baseline"
    mine, theirs = cell.number(name), reference.number(name)
    if mine is None:
        return "–"
    if theirs is None:
        return f"baseline: {reference.text(name)}"
    if not mine or not theirs:
        return "–"
    ratio = theirs / mine if cell.value.direction == "lower" else mine / theirs
    return f"{ratio:.2f}x"
