"""Writes a comparison as Markdown or CSV."""

from __future__ import annotations

import csv
from io import StringIO

from jobs.report.comparison.compare import Comparison
from jobs.report.comparison.compared_cell import cell_columns, count_text
from jobs.report.tables.render import markdown_table


def markdown_comparison(found: Comparison, every: bool) -> str:
    """Return a comparison as Markdown, with every cell or without those that say little.

    These are for example runs that are only in one of two folders.
    """
    chosen = found.cells if every else [cell for cell in found.cells if cell.is_important]
    parts = ["\n".join(found.heading)] if found.heading else []
    if chosen:
        parts.append(markdown_table(cell_columns(chosen, found.cells), "left"))
    left_out = len(found.cells) - len(chosen)
    counts = count_text(found.cells) + (f" ({left_out} not listed; use --all)" if left_out else "")
    return "\n\n".join([*parts, "\n".join([*found.notes, counts])])


def csv_comparison(found: Comparison) -> str:
    """Return a comparison as CSV with all cells. Headings and notes are comment lines."""
    text = StringIO()
    for line in (*found.heading, *found.notes):
        text.write(f"# {line}\n")
    columns = cell_columns(found.cells, found.cells, exact=True) if found.cells else {}
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return text.getvalue().removesuffix("\n")
