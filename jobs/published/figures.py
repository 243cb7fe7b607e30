"""Reads figures that others published, from the CSV files beside this one.

They are of other machines and settings, so a table shows each as it was printed, in a column that
names its source and its GPU; nothing is computed from it.
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
_MEASURED = ("_ms", "_mib", "_gib", "_percent")  # columns that do not distinguish rows


class Published(BaseModel):
    """A table's `published` entry: figures of others to show beside its rows."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+\.csv$")]  # in this folder
    value: str  # the column to show
    on: Annotated[dict[str, str], Field(min_length=1)]  # by row dimension, the column that has it
    where: dict[str, Scalar | list[Scalar]] = {}  # of the other columns
    label: str | None = None  # default: the value's


@dataclass(frozen=True)
class FigureFile:
    """One file of figures: its columns, and its rows as printed."""

    name: str
    columns: list[str]
    rows: list[dict[str, str]]

    def check_column(self, name: str) -> str:
        """Return the name of a column.

        Raises:
            TableError: there is no such column; naming those that there are.
        """
        if name not in self.columns:
            raise TableError(f"{self.name} has no column {name!r}{nearest(name, self.columns)}")
        return name

    def matching_rows(self, fixed: dict[str, Any]) -> list[dict[str, str]]:
        """The rows that have these values; for a list of values, any of them."""
        rows = self.rows
        for name, given in fixed.items():
            column = self.check_column(name)
            wanted = given if isinstance(given, list) else [given]
            rows = [row for row in rows if any(same_value(value, row[column]) for value in wanted)]
        return rows

    def ambiguity(self, what: str, rows: list[dict[str, str]]) -> str:
        """The error where one row is wanted and there are several: the columns that differ."""
        differ = [
            f"{name} ({', '.join(dict.fromkeys(row[name] for row in rows))})"
            for name in self.columns
            if not name.endswith(_MEASURED) and len({row[name] for row in rows}) > 1
        ]
        columns = ", ".join(differ) or "what was measured only"
        return f"{self.name} has {len(rows)} rows of {what}, which differ in {columns}"


@cache
def read_figures(file: str) -> FigureFile:
    """Read a file of published figures.

    Raises:
        TableError: there is none of this name; naming those that there are.
    """
    known = sorted(path.name for path in FOLDER.glob("*.csv"))
    if file not in known:
        raise TableError(f"no published figures {file!r}{nearest(file, known)}")
    with (FOLDER / file).open(encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines)
        return FigureFile(file, list(reader.fieldnames or []), list(reader))


def same_value(value: Any, text: str) -> bool:
    """True where a file's text is a parameter's value: 128 and 128.0, 2.7b and 2.7B, bf16 and
    bfloat16."""
    own, text = format_scalar(value).strip().casefold(), text.strip().casefold()
    if _DTYPES.get(own, own) == _DTYPES.get(text, text):
        return True
    try:
        return float(own) == float(text)
    except ValueError:
        return False


def published_figure(file: str, column: str, **where: Any) -> str | None:
    """The one figure in a column of a file, as printed, of the row with these values (for a list
    of values, any of them); None where there is none.

    Raises:
        TableError: a file or column that is not there; several figures.
    """
    figures = read_figures(file)
    figures.check_column(column)
    rows = [row for row in figures.matching_rows(where) if row[column]]
    if len(rows) > 1:
        what = ", ".join(f"{name}={value}" for name, value in where.items()) or "any kind"
        raise TableError(figures.ambiguity(what, rows))
    return rows[0][column] if rows else None


def published_problems(published: Published) -> list[tuple[tuple[str | int, ...], str]]:
    """Check a table's `published` entry by itself: each problem's place in it, and the problem."""
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
                what = f"{published.file} has no {name} {format_scalar(value)!r}"
                found.append((("where", name), what + nearest(format_scalar(value), has)))
    return found
