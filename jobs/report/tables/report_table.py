"""Makes the tables that a sweep declares, as text cells with a heading and notes.

`jobs.report.tables.render` formats these tables as Markdown, CSV, LaTeX or HTML.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from jobs.code.short_names import as_in_runs
from jobs.formatting import format_number, format_scalar
from jobs.frame.results import Key, Result
from jobs.frame.rows import NO_VALUE, Interval
from jobs.published.columns import published_columns
from jobs.published.figures import SEE
from jobs.report.tables.list_table import make_list_table
from jobs.report.tables.pivot import Pivot, make_pivot, names_in
from jobs.report.tables.speedup import DIGITS, Speedup, speedup_column, speedup_notes, text_notes
from jobs.report.views import select
from jobs.results.record import Record
from jobs.results.run_states import Observation
from jobs.sweep.views import Table

# Header and cells of a column, and the records that each cell shows (None for parameters).
Column = tuple[str, list[str], list[list[Record]] | None]


@dataclass
class ReportTable:
    """Table of text cells with a heading and notes."""

    heading: str
    dimensions: list[str]  # names of the columns that identify a row: parameters, device, ...
    keys: list[Key]  # for each row, the values of the dimensions
    notes: list[str]
    warnings: list[str]  # printed to stderr, not part of the table
    columns: dict[str, list[str]] = field(default_factory=dict)  # cells by header
    # For each row, the records that a cell shows, by header. Columns of parameters have none.
    records: dict[str, list[list[Record]]] = field(default_factory=dict)

    @property
    def measured_devices(self) -> set[str]:
        """The kinds of device of the successful records that the table shows."""
        shown = [record for cells in self.records.values() for cell in cells for record in cell]
        return {record.device for record in shown if record.status == "ok"}

    @property
    def has_values(self) -> bool:
        """Whether a cell shows a number, text or status of a run."""
        own = [cells for header, cells in self.columns.items() if header in self.records]
        return not own or any(cell not in ("", NO_VALUE) for cells in own for cell in cells)

    def add_column(
        self, header: str, cells: list[str], records: list[list[Record]] | None = None
    ) -> None:
        """Add a column. If the header already exists, make it unique with trailing spaces."""
        while header in self.columns:
            header += " "
        self.columns[header] = cells
        if records is not None:
            self.records[header] = records


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
    heading = shown.title
    if view.list_fact is not None:
        items = make_list_table(shown, view)
        table = ReportTable(heading, items.dimensions, items.keys, items.notes, [])
        names = {} if for_programs else names_in(shown.results, items.keys)
        columns: Iterable[Column] = [
            *_key_columns(items.dimensions, items.keys, names),
            *((header, cells, items.records) for header, cells in items.columns),
        ]
    else:
        pivot = make_pivot(shown)
        if for_programs:
            pivot = replace(pivot, names={})
        if len(pivot.metrics) == 1:  # several metrics are named in the columns or rows
            heading = pivot.metrics[0].heading(heading)
        baseline = {name: as_in_runs(value) for name, value in (view.baseline or {}).items()}
        speedups = {
            column: found
            for column in pivot.column_keys
            if (found := speedup_column(pivot, column, baseline)) is not None
        }
        notes = [*pivot.notes, *_absent_baseline(pivot, baseline)]
        every = [speedup for found in speedups.values() for speedup in found]
        notes += speedup_notes(every) + ([] if for_programs else text_notes(every))
        table = ReportTable(heading, pivot.row_names, pivot.row_keys, notes, pivot.warnings)
        columns = _pivot_columns(pivot, baseline, speedups, for_programs)
    if not table.keys:
        return None
    for column in columns:
        table.add_column(*column)
    _add_published(table, view)
    return table


def _key_columns(dimensions: list[str], keys: list[Key], names: dict[str, str]) -> Iterator[Column]:
    """Yield the columns that identify the runs of a table of lists."""
    for i, name in enumerate(dimensions):
        yield name, [names.get(key[i]) or format_scalar(key[i]) for key in keys], None


def _pivot_columns(
    pivot: Pivot, baseline: dict[str, Any], speedups: dict[Key, list[Speedup]], for_programs: bool
) -> Iterator[Column]:
    """Yield the header, the cells and the records of each column of a table.

    If the table declares a baseline, a column of speedups follows each column of results. The
    baseline column has no column of speedups. For programs, intervals are in columns of their own,
    instead of in the text of a cell, and further columns tell whether a speedup is paired, and the
    verdict.
    """
    for i, name in enumerate(pivot.row_names):
        yield name, [_coordinate_text(pivot, name, key[i]) for key in pivot.row_keys], None
    for column in pivot.column_keys:
        header = _header(pivot, column)
        cells = [pivot.cells.get((row, column)) for row in pivot.row_keys]
        records = [cell.all_records if cell else [] for cell in cells]
        yield header, [cell.text(not for_programs) if cell else "" for cell in cells], records
        if for_programs:
            intervals = [cell.interval if cell else None for cell in cells]
            yield from _ends(header, intervals)
        found = speedups.get(column)
        if found is None:
            continue
        against = [_column_text(pivot, name, value) for name, value in baseline.items()]
        header = f"{header} vs {' '.join(against)}"
        texts = [speedup.number if for_programs else speedup.text for speedup in found]
        yield header, texts, records
        if for_programs:
            yield from _ends(header, [speedup.interval for speedup in found], DIGITS)
            if any(speedup.pairing for speedup in found):
                yield f"{header} paired", [speedup.pairing for speedup in found], None
            if any(speedup.paired for speedup in found):
                yield f"{header} verdict", [speedup.verdict for speedup in found], None


def _ends(header: str, intervals: list[Interval | None], digits: int = 4) -> Iterator[Column]:
    """Yield columns with the lower and the upper ends of intervals, if there is an interval."""
    if any(intervals):
        for i, end in enumerate(("low", "high")):
            texts = [format_number(each[i], digits) if each else "" for each in intervals]
            yield f"{header} {end}", texts, None


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
