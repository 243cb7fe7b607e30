"""Formats tables as Markdown, CSV or LaTeX, and images as Markdown."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from tabulate import tabulate

from jobs.formatting import UNLIMITED, wrapped
from jobs.report.figures import Drawing
from jobs.report.tables.markdown import markdown_table
from jobs.report.tables.table import ReportTable

Format = Literal["md", "csv", "latex"]
ListFormat = Literal["md", "csv"]


def render(table: ReportTable, to: Format, width: int = UNLIMITED) -> str:
    """Return a table of a report as text in the given format.

    The text contains the heading, the cells and the notes. In CSV and LaTeX, the heading and the
    notes are comment lines. Markdown fits a terminal of `width` columns.
    """
    notes = ". ".join(table.notes)
    if to == "md":
        see = "--format csv or python -m jobs export FOLDER"
        cells = markdown_table(table.columns, "right", width, _least(table), see)
        parts = [wrapped(f"### {table.heading}", width), cells, wrapped(notes, width)]
        return "\n\n".join(part for part in parts if part) + "\n"
    lines = f"{table.heading}\n{notes}".splitlines()
    if to == "csv":
        return commented("#", lines, f"{csv_table(table.columns)}\n")
    return commented("%", lines, latex_table(table.columns, table.dimensions))


def commented(mark: str, lines: Iterable[str], table: str) -> str:
    """Return a table below lines of comments, which begin with a mark."""
    return "".join(f"{mark} {line}\n" for line in lines if line) + table


def csv_table(columns: dict[str, list[str]]) -> str:
    """Return columns of text as CSV, without a line break at its end."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return text.getvalue().removesuffix("\n")


def latex_table(columns: dict[str, list[str]], left: Collection[str]) -> str:
    """Return columns of text as LaTeX with booktabs. Those in `left` are aligned left."""
    rows = zip(*columns.values(), strict=True)
    align = ["left" if name in left else "right" for name in columns]
    form = {"tablefmt": "latex_booktabs", "disable_numparse": True, "colalign": align}
    return str(tabulate(rows, list(columns), **form))


def _least(table: ReportTable) -> list[str]:
    """Return the half of the measured columns that says less: speedups, and then the last ones."""
    measured = [name for name in reversed(table.columns) if name not in table.dimensions]
    return sorted(measured, key=lambda name: " vs " not in name)[: len(measured) // 2]


def markdown_image(image: Drawing, folder: Path) -> str:
    """Return the Markdown code of an image.

    The code is for a page that is next to the folder of the image. For example, the page
    results/flash.md refers to results/flash/time.png as flash/time.png.
    """
    title = re.sub(r"([\\\[\]])", r"\\\1", image.title)
    mark = "" if image.name.endswith(".pdf") else "!"  # Markdown shows no PDF
    return f"{mark}[{title}]({quote(f'{folder.resolve().name}/{image.name}')})"
