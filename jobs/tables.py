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
from jobs.values import kind_of, phases, samples_of, shown, shown_failure, spread, statistic

Key = tuple[Any, ...]
MAX_REASONS = 5


@dataclass(slots=True)
class Cell:
    """One place of a table: the samples of its repeats, or what became of them."""

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
    if isinstance(view, Table):
        rows, columns = list(view.rows), list(view.columns)
    else:
        rows, columns = [*view.facet, view.x], list(view.series)
    if not rows and not columns:
        swept = varying([entry.run for entry in chosen])
        columns = [name for name in swept if name in ("implementation", "backend")]
        rows = [name for name in swept if name not in columns]
    wanted = _phases(chosen, view)
    if len(wanted) > 1 and "phase" not in (*rows, *columns):
        columns.insert(0, "phase")
    for name in _not_told_apart(chosen, [*rows, *columns]):
        rows.insert(0, name)
    cells: dict[tuple[Key, Key], Cell] = {}
    for entry in chosen:
        for phase in wanted:
            row = tuple(_value(entry, name, phase) for name in rows)
            column = tuple(_value(entry, name, phase) for name in columns)
            cell = cells.setdefault((row, column), Cell())
            if entry.state != "ok" or entry.record is None:
                cell.failures.append(shown_failure(entry.record, entry.state))
                continue
            samples = samples_of(entry.record, view, phase)
            if samples is None:
                cell.texts.append("–")
            elif isinstance(samples, str):
                cell.texts.append(samples)
            else:
                cell.samples.append(samples)
    order = _declared(observation) | {"phase": {phase: i for i, phase in enumerate(wanted)}}
    row_keys = _sorted({row for row, _ in cells}, rows, order)
    column_keys = _sorted({column for _, column in cells}, columns, order)
    notes = _notes(chosen, view, list(cells.values()))
    return Filled(view, rows, columns, row_keys, column_keys, cells, notes)


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


def _value(entry: Entry, name: str, phase: str) -> Any:
    if name in PSEUDO:
        return {"phase": phase, "device": entry.device, "repeat": entry.repeat}[name]
    return entry.run.params[name]


def _phases(chosen: list[Entry], view: Table | Plot) -> list[str]:
    if view.phase is not None:
        return [view.phase] if isinstance(view.phase, str) else list(view.phase)
    seen: dict[str, None] = {}
    for entry in chosen:
        if entry.record is not None and entry.record.measurements is not None:
            seen.update(dict.fromkeys(phases(entry.record.measurements, view.value)))
    return list(seen) or [""]


def _not_told_apart(chosen: list[Entry], dims: list[str]) -> list[str]:
    """What else is needed so that no two different runs share a cell."""
    needed: list[str] = []
    if len({entry.device for entry in chosen if entry.device}) > 1 and "device" not in dims:
        needed.append("device")
    groups: dict[Key, dict[str, Run]] = {}
    for entry in chosen:
        key = tuple(_value(entry, name, "") for name in [*dims, *needed] if name != "phase")
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
    measured = [np.concatenate(cell.samples) for cell in cells if cell.samples]
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
        data[_unique(dim, data)] = [_plain(key[i]) for key in filled.row_keys]
    baseline = view.baseline if isinstance(view, Table) else None
    for column in filled.column_keys:
        header = " ".join(_plain(part) for part in column if part != "") or kind_of(view).label
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
    ratio = theirs / mine if kind_of(filled.view).direction == "lower" else mine / theirs
    return f"{ratio:.2f}x"
