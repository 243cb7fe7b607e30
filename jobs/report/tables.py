"""Runs and records -> tables: every run of the sweep has a cell, whatever became of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from jobs.errors import nearest
from jobs.formatting import format_number, format_scalar
from jobs.record import Measurements
from jobs.report.entries import (
    Entry,
    Key,
    coordinate,
    declared,
    in_order,
    not_told_apart,
    selected,
)
from jobs.report.predictions import predicted
from jobs.report.values import (
    Value,
    measured_phases,
    phases,
    samples_of,
    shown_failure,
    spread,
    statistic,
    values_of,
)
from jobs.run import varying
from jobs.status import Observation
from jobs.sweep.schema import PREDICTED, Plot, Table

MAX_REASONS = 5


@dataclass(slots=True)
class Cell:
    """One place of a table: the samples of its repeats, or what became of them."""

    value: Value
    samples: list[np.ndarray] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, entry: Entry, phase: str) -> None:
        """Put in one run's value, or what became of the run."""
        samples: np.ndarray | str | None
        if self.value.name.startswith(PREDICTED):
            samples = predicted(entry.run, self.value)
        elif entry.state != "ok" or entry.record is None:
            self.failures.append(shown_failure(entry.record, entry.state))
            return
        else:
            samples = samples_of(entry.record, self.value, phase)
        if samples is None:
            self.texts.append("–")
        elif isinstance(samples, str):
            self.texts.append(samples)
        else:
            self.samples.append(samples)

    def number(self, name: str) -> float | None:
        """This statistic of all samples; None where there are none."""
        return statistic(np.concatenate(self.samples), name) if self.samples else None

    def text(self, name: str) -> str:
        """The number, or why there is none; where repeats differ, how many are behind it."""
        number = self.number(name)
        if number is None:
            return ", ".join(dict.fromkeys([*self.texts, *self.failures]))
        text = format_number(number)
        if name == "mean_std":
            text += f" ± {format_number(statistic(np.concatenate(self.samples), 'std'))}"
        if self.failures:
            ok, total = len(self.samples), len(self.samples) + len(self.failures)
            text += f" ({ok} of {total} repeats; {', '.join(dict.fromkeys(self.failures))})"
        return text


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
    notes: list[str]  # for who reads the table
    warnings: list[str]  # for who makes it


def fill(observation: Observation, view: Table | Plot, chosen: list[Entry] | None = None) -> Filled:
    """Put every run that a view shows in its place.

    Raises:
        TableError: it names what no run has, or a prediction failed.
    """
    chosen = selected(observation, view, chosen)
    values = values_of(view)
    rows, columns = _dims(view, chosen)
    wanted = _phases(chosen, view, "phase" in rows)
    every = list(dict.fromkeys(phase for of_value in wanted.values() for phase in of_value))
    if len([phase for phase in every if phase]) > 1 and "phase" not in (*rows, *columns):
        columns.insert(0, "phase")
    if len(values) > 1 and "value" not in (*rows, *columns):
        columns.append("value")
    rows = [*not_told_apart(chosen, [*rows, *columns]), *rows]
    cells: dict[tuple[Key, Key], Cell] = {}
    for entry in chosen:
        for value in values:
            for phase in wanted[value.name]:
                row = tuple(coordinate(entry, name, phase, value.name) for name in rows)
                column = tuple(coordinate(entry, name, phase, value.name) for name in columns)
                cells.setdefault((row, column), Cell(value)).add(entry, phase)
    order = declared(observation)
    order["phase"] = {phase: i for i, phase in enumerate(every)}
    order["value"] = {value.name: i for i, value in enumerate(values)}
    row_keys = in_order({row for row, _ in cells}, rows, order)
    column_keys = in_order({column for _, column in cells}, columns, order)
    notes = describe(chosen, _sampling(chosen, view, cells.values()))
    warnings = _unknown_phases(chosen, view)
    return Filled(view, values, rows, columns, row_keys, column_keys, cells, notes, warnings)


def _dims(view: Table | Plot, chosen: list[Entry]) -> tuple[list[str], list[str]]:
    """What the view says stands in rows and columns; where it says nothing, what was swept."""
    if isinstance(view, Plot):
        return [*view.facet, view.x], list(view.series)
    if view.rows or view.columns:
        return list(view.rows), list(view.columns)
    swept = varying([entry.run for entry in chosen])
    columns = [name for name in swept if name in ("implementation", "backend")]
    return [name for name in swept if name not in columns], columns


def _phases(chosen: list[Entry], view: Table | Plot, in_rows: bool) -> dict[str, list[str]]:
    """By value, the phases to show: as the view says, else all that were measured. What has no
    phase of its own stands in the row of every phase, but in one column."""
    given, measured = _given_phases(view), _measurements(chosen)
    seen: dict[str, list[str]] = {}
    for value in values_of(view):
        found = dict.fromkeys(phase for m in measured for phase in phases(m, value.name))
        seen[value.name] = (given or list(found)) if value.has_phases else []
    every = list(dict.fromkeys(phase for of_value in seen.values() for phase in of_value))
    instead = every if in_rows and every else [""]
    return {name: found or instead for name, found in seen.items()}


def _given_phases(view: Table | Plot) -> list[str]:
    return [view.phase] if isinstance(view.phase, str) else list(view.phase or [])


def _measurements(chosen: list[Entry]) -> list[Measurements]:
    return [e.record.measurements for e in chosen if e.record and e.record.measurements]


def _unknown_phases(chosen: list[Entry], view: Table | Plot) -> list[str]:
    """Phases that a view names and that none of its runs measured, though some were measured."""
    has = list(dict.fromkeys(p for m in _measurements(chosen) for p in measured_phases(m)))
    unknown = [phase for phase in _given_phases(view) if has and phase not in has]
    return [f"no run has phase {phase!r}{nearest(phase, has)}" for phase in unknown]


def describe(chosen: list[Entry], sampled: str = "") -> list[str]:
    """The notes under a table: on which devices, how `sampled`, and of runs without a record what
    their jobs' states say of why."""
    devices = ", ".join(dict.fromkeys(entry.device for entry in chosen if entry.device))
    first = "; ".join(text for text in (devices, sampled) if text)
    told = Counter(
        f"{entry.state}: {entry.detail}" for entry in chosen if not entry.record and entry.detail
    )
    reasons = [
        f"{reason} ({count} run{'s' if count > 1 else ''})"
        for reason, count in told.most_common(MAX_REASONS)
    ]
    if len(told) > MAX_REASONS:
        reasons.append(f"and {len(told) - MAX_REASONS} more reasons (python -m jobs status)")
    return [*([first] if first else []), *reasons]


def _sampling(chosen: list[Entry], view: Table | Plot, cells: Iterable[Cell]) -> str:
    """How many samples are behind the numbers, and how far they spread."""
    sampled = [cell for cell in cells if cell.samples and cell.value.is_sampled]
    measured = [np.concatenate(cell.samples) for cell in sampled]
    counts = [len(samples) for samples in measured]
    if max(counts, default=0) <= 1:
        return ""
    spreads = [spread(samples) for samples in measured if len(samples) > 1]
    name = {"mean_std": "mean ± standard deviation"}.get(view.statistic, view.statistic)
    low, high = min(counts), max(counts)
    parts = [f"{name} of {low}{f' to {high}' if high > low else ''} samples"]
    if any(_has_ranks(entry) for entry in chosen):
        parts.append("the slowest rank's")
    middle, worst = np.median(spreads), max(spreads)
    parts.append(
        f"interquartile range {middle:.1%} of the median in the middle case, "
        f"{worst:.1%} in the worst"
    )
    return "; ".join(parts)


def _has_ranks(entry: Entry) -> bool:
    measurements = entry.record.measurements if entry.record else None
    return measurements is not None and any(
        not isinstance(samples[0], (int, float)) for samples in measurements.samples_ms.values()
    )


def frame(filled: Filled) -> pd.DataFrame:
    """The table as text cells; with a baseline, each column is followed by its speed-up."""
    view = filled.view
    name = view.statistic
    data: dict[str, list[str]] = {}
    for i, dim in enumerate(filled.rows):
        data[unique_header(dim, data)] = [_told(filled, dim, key[i]) for key in filled.row_keys]
    baseline = view.baseline if isinstance(view, Table) else None
    for column in filled.column_keys:
        header = _header(filled, column)
        cells = [filled.cells.get((row, column)) for row in filled.row_keys]
        data[unique_header(header, data)] = [cell.text(name) if cell else "" for cell in cells]
        if baseline:
            base = tuple(
                baseline.get(dim, own) for dim, own in zip(filled.columns, column, strict=True)
            )
            if base != column:
                against = " ".join(format_scalar(value) for value in baseline.values())
                data[unique_header(f"{header} vs {against}", data)] = [
                    _speedup(filled, row, column, base) for row in filled.row_keys
                ]
    return pd.DataFrame(data)


def _header(filled: Filled, column: Key) -> str:
    parts = zip(filled.columns, column, strict=True)
    told = [_told(filled, dim, own) for dim, own in parts if own != ""]
    return " ".join(told) or filled.values[0].label


def _told(filled: Filled, dim: str, own: Any) -> str:
    """One part of a row's or column's key as a reader sees it."""
    if dim == "value":
        return next(value.header for value in filled.values if value.name == own)
    return format_scalar(own)


def unique_header(header: str, data: Iterable[str]) -> str:
    """A header that no column has yet."""
    taken = set(data)
    while header in taken:
        header += " "
    return header


def _speedup(filled: Filled, row: Key, column: Key, base: Key) -> str:
    """How many times better than the baseline; what became of either where there is no number."""
    name = filled.view.statistic
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
