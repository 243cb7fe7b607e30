"""A declared table -> a sheet: what stands above it, its text cells, what stands below it.

`aggregate.py` writes sheets as Markdown, CSV, LaTeX or HTML.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pandas as pd

from jobs.observation import Observation
from jobs.published.figures import SEE, published_columns
from jobs.report.entries import Entry, Key
from jobs.report.lists import listed
from jobs.report.tables import fill, frame, unique_header
from jobs.report.texts import render_text
from jobs.sweep.schema import Table


@dataclass(frozen=True)
class Sheet:
    """A table as a reader sees it."""

    heading: str
    dims: list[str]  # what a row is of: parameters, device and the like
    keys: list[Key]  # of each row, their values
    data: pd.DataFrame
    notes: list[str]
    warnings: list[str] = field(default_factory=list)  # for who makes the report
    text: str = ""  # of the sweep, with its numbers


def make_sheet(observation: Observation, view: Table, chosen: list[Entry]) -> Sheet | None:
    """The sheet of a table; None where the sweep has no run for it.

    Raises:
        TableError: what the table asks for is not known.
    """
    heading = " ".join((view.title or "").split()) or view.name  # one line in every format
    if view.list is not None:
        items = listed(observation, view, chosen)
        sheet = Sheet(heading, items.dims, items.keys, items.frame(), items.notes)
    else:
        filled = fill(observation, view, chosen)
        if len(filled.values) == 1:  # else each column, or row, says its own
            heading += f": {filled.values[0].header}"
        sheet = Sheet(heading, filled.rows, filled.row_keys, frame(filled), filled.notes)
        sheet = replace(sheet, warnings=filled.warnings)
    if not sheet.keys:
        return None
    sheet = _with_published(sheet, view)
    if view.text is None:
        return sheet
    warnings = list(sheet.warnings)
    text = render_text(observation, view, chosen, warnings.append)
    return replace(sheet, text=text, warnings=warnings)


def _with_published(sheet: Sheet, view: Table) -> Sheet:
    """The sheet with the columns of published figures, and where to read of their sources."""
    data, absent = sheet.data, []
    for source in view.published:
        columns = published_columns(source, sheet.dims, sheet.keys)
        for header, cells in columns.items():
            data = data.assign(**{unique_header(header, data.columns): cells})
        if not columns:
            absent.append(source.file)
    notes = [f"{', '.join(dict.fromkeys(absent))}: no figure of these rows"] if absent else []
    if view.published:
        notes.append(f"Published figures are of other machines and settings: see {SEE}")
    return replace(sheet, data=data, notes=[*sheet.notes, *notes])
