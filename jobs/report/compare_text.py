"""Writes a comparison as Markdown or CSV."""

from __future__ import annotations

from jobs.formatting import UNLIMITED, wrapped
from jobs.report.tables.markdown import markdown_table
from jobs.report.tables.render import ListFormat, render_columns
from jobs.verdicts.cell import cell_columns, count_text
from jobs.verdicts.compare import Comparison

# The columns that a narrow terminal does not show, the first one first
_LEAST = ("allocations", "rounds", "processes", "95% interval", "before (ms)", "after (ms)")


def markdown_comparison(found: Comparison, every: bool, width: int = UNLIMITED) -> str:
    """Return a comparison as Markdown, with every cell or without those that say little.

    These are for example runs that are only in one of two folders. The table fits a terminal of
    `width` columns.
    """
    chosen = found.cells if every else [cell for cell in found.cells if cell.is_important]
    parts = ["\n".join(_wrapped(found.heading, width))] if found.heading else []
    if chosen:
        parts.append(markdown_table(cell_columns(chosen, found.cells), "left", width, _LEAST))
    left_out = len(found.cells) - len(chosen)
    counts = count_text(found.cells) + (f" ({left_out} not listed; use --all)" if left_out else "")
    return "\n\n".join([*parts, "\n".join(_wrapped([*found.notes, counts], width))])


def _wrapped(lines: list[str], width: int) -> list[str]:
    """Return lines of text that fit a width. Those with a command stay whole, to be copied."""
    return [line if " -m " in line else wrapped(line, width) for line in lines]


def csv_comparison(found: Comparison) -> str:
    """Return a comparison as CSV with all cells. Headings and notes are comment lines."""
    comments = "".join(f"# {line}\n" for line in (*found.heading, *found.notes))
    columns = cell_columns(found.cells, found.cells, exact=True) if found.cells else {}
    return (comments + render_columns(columns, ListFormat.csv)).removesuffix("\n")
