"""Formats tables as Markdown, CSV, LaTeX or HTML, and images as Markdown."""

from __future__ import annotations

import csv
import io
import re
from enum import StrEnum
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from tabulate import tabulate

from jobs.report.images import Image
from jobs.report.tables.report_table import ReportTable

if TYPE_CHECKING:
    import pandas as pd

_LATEX = {"±": r"$\pm$", "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\^{}"} | {
    character: f"\\{character}" for character in "%_&#${}"
}


class Format(StrEnum):
    md = "md"
    csv = "csv"
    latex = "latex"
    html = "html"


class ListFormat(StrEnum):
    md = "md"
    csv = "csv"


def render_columns(columns: dict[str, list[str]], to: ListFormat) -> str:
    """Return columns of text as a Markdown table or as CSV."""
    if to is ListFormat.md:
        return markdown_table(columns, "left") + "\n"
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    return text.getvalue()


def render(table: ReportTable, to: Format) -> str:
    """Return a table of a report as text in the given format.

    The text contains the heading, the cells, the notes and the paragraphs below the table. In CSV,
    the heading and the notes are comment lines, and the paragraphs are omitted.
    """
    notes = ". ".join(table.notes)
    if to is Format.md:
        parts = [f"### {table.heading}", markdown_table(table.columns), notes, table.text]
        return "\n\n".join(part for part in parts if part) + "\n"
    data = _data_frame(table)
    if to is Format.csv:
        comments = "".join(f"# {line}\n" for line in (table.heading, notes) if line)
        return comments + data.to_csv(index=False)
    if to is Format.latex:
        latex = (
            data.style.hide(axis="index")
            .format(escape="latex")
            .format_index(escape="latex", axis=1)
            .to_latex(caption=_latex(f"{table.heading}. {notes}"), hrules=True)
        )
        return str(latex) + (f"\n{_latex(table.text)}\n" if table.text else "")
    paragraphs = [notes, *re.split(r"\n\s*\n", table.text)]
    below = "\n".join(f"<p>{escape(text)}</p>" for text in paragraphs if text)
    return f"<h3>{escape(table.heading)}</h3>\n{data.to_html(index=False, border=0)}\n{below}"


def _data_frame(table: ReportTable) -> pd.DataFrame:
    import pandas as pd  # slow to import, and not needed for Markdown

    return pd.DataFrame(table.columns)


def markdown_table(columns: dict[str, list[str]], align: str = "right") -> str:
    """Return a Markdown table, with all columns aligned "left", "center" or "right".

    Special characters are escaped. For example, names of kernels can contain `|`, `<` and `*`.
    """
    table = tabulate(
        [list(map(_markdown_cell, row)) for row in zip(*columns.values(), strict=True)],
        headers=list(map(_markdown_cell, columns)),
        tablefmt="pipe",
        disable_numparse=True,
        colalign=[align] * len(columns),
    )
    return str(table)


def _markdown_cell(text: str) -> str:
    return re.sub(r"([\\|<*`])", r"\\\1", text).replace("\n", " ")


def _latex(text: str) -> str:
    return "".join(_LATEX.get(character, character) for character in text)


def markdown_image(image: Image, folder: Path) -> str:
    """Return the Markdown code of an image.

    The code is for a page that is next to the folder of the image. For example, the page
    results/flash.md refers to results/flash/time.png as flash/time.png.
    """
    title = re.sub(r"([\\\[\]])", r"\\\1", image.title)
    return f"![{title}]({quote(f'{folder.resolve().name}/{image.path.name}')})"
