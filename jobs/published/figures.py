"""Reads published figures from the CSV files in the folder of this module.

Published figures are values that other authors measured, on other machines and with other settings.
A table shows each figure exactly as it was printed, below its source and GPU.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from jobs.errors import TableError, nearest
from jobs.formatting import format_scalar

FOLDER = Path(__file__).resolve().parent
SEE = "jobs/published/README.md"
Scalar = bool | int | float | str | None
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_MEASURED = ("_ms", "_mib", "_gib", "_percent")  # suffixes of columns with measured values


class Published(BaseModel):
    """Selects published figures: an entry of the key `published` of a table in a sweep file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+\.csv$")]  # in this folder
    value: str  # column to show
    on: Annotated[dict[str, str], Field(min_length=1)]  # row parameter -> column of the file
    where: dict[str, Scalar | list[Scalar]] = {}  # required values of other columns
    label: str | None = None  # header of the column in the table; default: `value`


@dataclass(frozen=True)
class FigureFile:
    """One CSV file of published figures. Values are text, as printed by their source."""

    name: str
    columns: list[str]
    rows: list[dict[str, str]]

    def check_column(self, name: str) -> str:
        """Return the name of a column. Raises TableError if the file has no such column."""
        if name not in self.columns:
            raise TableError(f"{self.name} has no column {name!r}{nearest(name, self.columns)}")
        return name

    def matching_rows(self, fixed: dict[str, Any]) -> list[dict[str, str]]:
        """Return the rows in which each given column has the required value, or one of a list."""
        rows = self.rows
        for name, given in fixed.items():
            column = self.check_column(name)
            rows = [row for row in rows if is_allowed(given, row[column])]
        return rows

    def ambiguity(self, what: str, rows: list[dict[str, str]]) -> str:
        """Return the error message for a selection, `what`, that matches several rows."""
        differ = [
            f"{name} ({', '.join(dict.fromkeys(row[name] for row in rows))})"
            for name in self.columns
            if not name.endswith(_MEASURED) and len({row[name] for row in rows}) > 1
        ]
        columns = ", ".join(differ) or "measured values only"
        return (
            f"{self.name} has {len(rows)} rows of {what}, which differ in {columns}; "
            "select one row by these columns"
        )


@cache
def read_figures(file: str) -> FigureFile:
    """Read a CSV file, given by its name without the folder. Raises TableError if there is none."""
    known = sorted(path.name for path in FOLDER.glob("*.csv"))
    if file not in known:
        raise TableError(f"there is no file of published figures {file!r}{nearest(file, known)}")
    with (FOLDER / file).open(encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines)
        return FigureFile(file, list(reader.fieldnames or []), list(reader))


def same_value(value: Any, text: str) -> bool:
    """Return True if the value of a parameter equals a text in a CSV file.

    Numbers are compared as numbers. Case, and the long or short name of a dtype, do not matter.
    """
    own, text = format_scalar(value).strip().casefold(), text.strip().casefold()
    if _DTYPES.get(own, own) == _DTYPES.get(text, text):
        return True
    try:
        return float(own) == float(text)
    except ValueError:
        return False


def is_allowed(given: Any, text: str) -> bool:
    """Return True if a text is the required value, or one of a list of them, see `same_value`."""
    return any(same_value(value, text) for value in (given if isinstance(given, list) else [given]))


def published_figure(file: str, column: str, **where: Any) -> str:
    """Return one published figure as printed.

    `where` has conditions on other columns: the required value, or a list of allowed values.
    Raises TableError, also if no figure matches, or several.
    """
    figures = read_figures(file)
    figures.check_column(column)
    rows = [row for row in figures.matching_rows(where) if row[column]]
    what = ", ".join(f"{name}={format_scalar(value)}" for name, value in where.items())
    if not rows:
        raise TableError(f"{file} has no {column} for {what or 'any row'}")
    if len(rows) > 1:
        raise TableError(figures.ambiguity(what or "any kind", rows))
    return rows[0][column]


def published_problems(published: Published) -> list[tuple[tuple[str | int, ...], str]]:
    """Return the errors in settings: the path of the key within them, and the message."""
    try:
        figures = read_figures(published.file)
    except TableError as error:
        return [(("file",), str(error))]
    places: list[tuple[tuple[str | int, ...], str]] = [(("value",), published.value)]
    places += [(("on", name), column) for name, column in published.on.items()]
    places += [(("where", name), name) for name in published.where]
    found = []
    for place, column in places:
        try:
            figures.check_column(column)
        except TableError as error:
            found.append((place, str(error)))
    for name, given in published.where.items():
        has = list(dict.fromkeys(row[name] for row in figures.rows if name in row))
        for value in given if isinstance(given, list) else [given]:
            if has and not any(same_value(value, text) for text in has):
                what = f"{published.file} has no row with {name} {format_scalar(value)!r}"
                found.append((("where", name), what + nearest(format_scalar(value), has)))
    return found
