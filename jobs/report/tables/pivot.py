"""Arranges results of runs in the rows and columns of a table or plot.

A run that failed or is missing has a cell, too. This cell shows the status of the run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from jobs.code.short_names import short_names
from jobs.errors import nearest
from jobs.frame.metrics import (
    Metric,
    fact_number,
    measured_phases,
    metrics_of,
    phases_with,
    scalars,
)
from jobs.frame.results import Key, Result
from jobs.frame.rows import Cell, Row, rows_of
from jobs.report.tables.notes import notes_of
from jobs.report.views import Shown
from jobs.results.record import Measurements
from jobs.run import varying
from jobs.sweep.views import FACT, Plot, Table


@dataclass(frozen=True)
class Pivot:
    """Cells of a table or plot, arranged in rows and columns.

    A dimension is a parameter, or one of phase, device, repeat and value (the metric).
    A row key is a tuple with one value for each dimension of the rows. A column key is a tuple with
    one value for each dimension of the columns.
    """

    shown: Shown
    metrics: list[Metric]
    row_names: list[str]  # dimensions of the rows
    column_names: list[str]  # dimensions of the columns
    row_keys: list[Key]  # in the order of the sweep file
    column_keys: list[Key]  # in the order of the sweep file
    cells: dict[tuple[Key, Key], Cell]  # by row key and column key
    notes: list[str]  # shown below the table
    warnings: list[str]  # printed to stderr, not part of the table
    names: dict[str, str]  # short names of the references that the keys contain


def make_pivot(shown: Shown) -> Pivot:
    """Arrange the results of a table or plot in rows and columns.

    Raises:
        TableError: if a prediction fails.
    """
    view, results = shown.view, shown.results
    metrics = metrics_of(view)
    rows, columns = _rows_and_columns(view, results)
    wanted = _phases_by_metric(results, view, "phase" in rows)
    phases = list(dict.fromkeys(phase for of_metric in wanted.values() for phase in of_metric))
    if len([phase for phase in phases if phase]) > 1 and "phase" not in (*rows, *columns):
        columns.insert(0, "phase")
    if len(metrics) > 1 and "value" not in (*rows, *columns):
        columns.append("value")
    rows = [*shown.extra_dimensions([*rows, *columns]), *rows]
    grouped: dict[tuple[Key, Key], list[Row]] = {}
    for metric in metrics:
        for row in rows_of(results, metric, wanted[metric.name]):
            grouped.setdefault((_key(row, rows), _key(row, columns)), []).append(row)
    cells = {place: Cell(found, view.statistic) for place, found in grouped.items()}
    orders = {"phase": phases, "value": [metric.name for metric in metrics]}
    row_keys = shown.sorted({row for row, _ in cells}, rows, **orders)
    column_keys = shown.sorted({column for _, column in cells}, columns, **orders)
    timed = phases if any(metric.is_sampled for metric in metrics) else ()
    return Pivot(
        shown,
        metrics,
        rows,
        columns,
        row_keys,
        column_keys,
        cells,
        [*notes_of(shown, cells.values(), timed), *_differences_in_rows(shown, rows, columns)],
        [*_unknown_phases(results, view), *_unknown_facts(results, metrics)],
        names_in(results, [*row_keys, *column_keys]),
    )


def _differences_in_rows(shown: Shown, rows: list[str], columns: list[str]) -> list[str]:
    """Return a note on parameters that the table does not show, in which runs of a row differ."""
    differ = [name for name in shown.differences(rows) if name not in columns]
    return [f"runs in a row also differ in {', '.join(differ)}"] if differ else []


def _key(row: Row, dimensions: list[str]) -> Key:
    phase, metric = row.phase, row.metric.name
    return tuple([row.result.coordinate(name, phase, metric) for name in dimensions])


def names_in(results: list[Result], keys: Iterable[Key]) -> dict[str, str]:
    """Return a short name for each reference to code outside this project in some keys."""
    references = {reference for result in results for reference in result.run.code}
    return short_names(references, (value for key in keys for value in key))


def _rows_and_columns(view: Table | Plot, results: list[Result]) -> tuple[list[str], list[str]]:
    """Return the names of the row dimensions and of the column dimensions of a table or plot.

    If a table declares neither rows nor columns, its dimensions are the parameters that vary among
    the runs. In this case, `implementation` and `backend` are columns, and all others are rows.
    """
    if view.rows or view.columns:
        return list(view.rows), list(view.columns)
    swept = varying([result.run for result in results])
    columns = [name for name in swept if name in ("implementation", "backend")]
    return [name for name in swept if name not in columns], columns


def _phases_by_metric(
    results: list[Result], view: Table | Plot, in_rows: bool
) -> dict[str, list[str]]:
    """Return the phases that a table or plot shows for each metric, by name of the metric.

    If the table or plot declares phases, these phases are shown. Otherwise, all phases in which the
    metric was measured are shown. If a metric has no phases, the result for this metric is [""], so
    that it has one column. However, if each row is for one phase (`in_rows`), the result for this
    metric is the phases of all rows, so that its value is repeated in each row.
    """
    measured = _measurements(results)
    found: dict[str, list[str]] = {}
    for metric in metrics_of(view):
        have = dict.fromkeys(phase for m in measured for phase in phases_with(m, metric))
        found[metric.name] = (view.phases or list(have)) if metric.has_phases else []
    every = list(dict.fromkeys(phase for phases in found.values() for phase in phases))
    instead = every if in_rows and every else [""]
    return {name: phases or instead for name, phases in found.items()}


def _measurements(results: list[Result]) -> list[Measurements]:
    """Return measurements of each set of phases that occurs. Most runs have the same phases."""
    found: dict[tuple[Any, ...], Measurements] = {}
    for result in results:
        m = result.measurements
        if m is not None:
            by_phase = (m.samples_ms, m.peak_memory_bytes, m.flops, m.bytes, m.bus_bytes, m.tokens)
            found.setdefault(tuple([tuple(each) for each in by_phase]), m)
    return list(found.values())


def _unknown_phases(results: list[Result], view: Table | Plot) -> list[str]:
    """Return a warning for each phase that the table or plot declares but no run has."""
    has = list(dict.fromkeys(p for m in _measurements(results) for p in measured_phases(m)))
    unknown = [phase for phase in view.phases if has and phase not in has]
    return [f"no run has phase {phase!r}{nearest(phase, has)}" for phase in unknown]


def _unknown_facts(results: list[Result], metrics: list[Metric]) -> list[str]:
    """Return a warning for each fact that the table or plot shows but no run has."""
    facts = [result.measurements.facts for result in results if result.measurements is not None]
    unknown = [
        metric.name
        for metric in metrics
        if metric.name.startswith(FACT) and all(fact_number(own, metric) is None for own in facts)
    ]
    has = {FACT + ".".join(path): None for own in facts if unknown for path, _ in scalars(own)}
    return [f"no run has {name!r}{nearest(name, list(has))}" for name in unknown if has]
