"""Makes the tables that a sweep declares, as text cells with a heading and notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jobs.code.short_names import as_in_runs
from jobs.formatting import format_number, format_scalar
from jobs.frame.results import Key, Result
from jobs.frame.rows import Interval
from jobs.published.figures import SEE, published_columns
from jobs.report.tables.list_table import make_list_table
from jobs.report.tables.pivot import Pivot, make_pivot
from jobs.report.tables.speedup import DIGITS, speedup_column, speedup_notes, text_notes
from jobs.report.tables.table import ReportTable
from jobs.report.views import Shown, select
from jobs.results.run_states import Observation
from jobs.sweep.views import Table


def make_report_table(
    observation: Observation, view: Table, results: list[Result], for_programs: bool = False
) -> ReportTable | None:
    """Make a table that the sweep file declares. Return None if the table has no rows.

    For programs (CSV), references to code outside this project are in full, because short names
    depend on the other values in a table. Intervals are in columns of their own.

    Raises:
        TableError: if the table cannot be made, for example because it names an unknown parameter.
    """
    shown = select(observation, view, results)
    make = _make_pivot_table if view.list_fact is None else make_list_table
    table = make(shown, view, for_programs)
    if not table.keys:
        return None
    _add_published(table, view)
    return table


def _make_pivot_table(shown: Shown, view: Table, for_programs: bool) -> ReportTable:
    """Make a table with one row for each run, or for several runs that columns tell apart.

    If the table declares a baseline, a column of speedups follows each column of results. The
    baseline column has no column of speedups. For programs, intervals are in columns of their own,
    instead of in the text of a cell, and further columns tell whether a speedup is paired, and the
    verdict.
    """
    pivot = make_pivot(shown)
    if for_programs:
        pivot = replace(pivot, names={})
    heading = shown.title
    if len(pivot.metrics) == 1:  # several metrics are named in the columns or rows
        heading = pivot.metrics[0].heading(heading)
    table = ReportTable(heading, pivot.row_names, pivot.row_keys, pivot.notes, pivot.warnings)
    for i, name in enumerate(pivot.row_names):
        table.add_column(name, [_coordinate_text(pivot, name, key[i]) for key in pivot.row_keys])
    baseline = {name: as_in_runs(value) for name, value in (view.baseline or {}).items()}
    every = []
    for column in pivot.column_keys:
        header = _header(pivot, column)
        cells = [pivot.cells.get((row, column)) for row in pivot.row_keys]
        records = [cell.all_records if cell else [] for cell in cells]
        texts = [cell.text(not for_programs) if cell else "" for cell in cells]
        table.add_column(header, texts, records)
        if for_programs:
            _add_ends(table, header, [cell.interval if cell else None for cell in cells])
        found = speedup_column(pivot, column, baseline)
        if found is None:
            continue
        every += found
        against = [_column_text(pivot, name, value) for name, value in baseline.items()]
        header = f"{header} vs {' '.join(against)}"
        texts = [speedup.number if for_programs else speedup.text for speedup in found]
        table.add_column(header, texts, records)
        if for_programs:
            _add_ends(table, header, [speedup.interval for speedup in found], DIGITS)
            if any(speedup.pairing for speedup in found):
                table.add_column(f"{header} paired", [speedup.pairing for speedup in found])
            if any(speedup.paired for speedup in found):
                table.add_column(f"{header} verdict", [speedup.verdict for speedup in found])
    table.notes += [*_absent_baseline(pivot, baseline), *speedup_notes(every)]
    table.notes += [] if for_programs else text_notes(every)
    return table


def _add_ends(
    table: ReportTable, header: str, intervals: Sequence[Interval | None], digits: int = 4
) -> None:
    """Add columns with the lower and the upper ends of intervals, if there is an interval."""
    if any(intervals):
        for i, end in enumerate(("low", "high")):
            texts = [format_number(each[i], digits) if each else "" for each in intervals]
            table.add_column(f"{header} {end}", texts)


def _absent_baseline(pivot: Pivot, baseline: dict[str, Any]) -> list[str]:
    """Return a note if no column is that of the baseline, so that there are no speedups."""
    for column in pivot.column_keys:
        if baseline.items() <= dict(zip(pivot.column_names, column, strict=True)).items():
            return []
    named = ", ".join(f"{name} {format_scalar(value)}" for name, value in baseline.items())
    return [f"no speedups, because there are no results of the baseline ({named})"]


def _header(pivot: Pivot, column: Key) -> str:
    named = zip(pivot.column_names, column, strict=True)
    texts = [_column_text(pivot, name, own) for name, own in named if own != ""]
    return " ".join(texts) or pivot.metrics[0].label


def _column_text(pivot: Pivot, dimension: str, own: Any) -> str:
    """Return a value of a column as text for its header; true, false and null with their name."""
    text = _coordinate_text(pivot, dimension, own)
    return f"{dimension}={text}" if own is None or isinstance(own, bool) else text


def _coordinate_text(pivot: Pivot, dimension: str, own: Any) -> str:
    """Return a value that identifies a row or column as text, such as a parameter value.

    In the dimension `value`, `own` is the name of a metric, and the text is the header of the
    metric.
    """
    if dimension == "value":
        return next(metric.header for metric in pivot.metrics if metric.name == own)
    return pivot.names.get(own) or format_scalar(own)


def _add_published(table: ReportTable, view: Table) -> None:
    """Add columns with values that other authors published, and notes on their sources."""
    absent = []
    for source in view.published:
        columns = published_columns(source, table.dimensions, table.keys)
        for header, cells in columns.items():
            table.add_column(header, cells)
        if not columns:
            absent.append(source.file)
    if absent:
        table.notes.append(
            f"{', '.join(dict.fromkeys(absent))}: no published figures for these rows"
        )
    if view.published:
        table.notes.append(f"Published figures are from other machines and settings: see {SEE}")
