"""Figures that others published, in jobs/published/, beside what was measured here.

They are of other machines and settings, so each stands in a column that names its source and its
GPU, as it was printed; nothing is computed from it in a table.
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
_UNSTATED = "unstated"  # what a source does not say
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
_MEASURED = ("_ms", "_mib", "_gib", "_percent")  # the columns that do not tell rows apart


class Published(BaseModel):
    """Figures of others beside a table's rows: a column for each source and GPU that has any."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+\.csv$")]  # in this folder
    value: str  # the column to show
    on: Annotated[dict[str, str], Field(min_length=1)]  # by row dimension, the column that has it
    where: dict[str, Scalar | list[Scalar]] = {}  # of the other columns
    label: str | None = None  # default: the value's


@dataclass(frozen=True)
class Figures:
    """One file: its columns, and its rows as printed."""

    file: str
    columns: list[str]
    rows: list[dict[str, str]]

    def column(self, name: str) -> str:
        """The name, if there is such a column.

        Raises:
            TableError: naming those that there are.
        """
        if name not in self.columns:
            raise TableError(f"{self.file} has no column {name!r}{nearest(name, self.columns)}")
        return name

    def where(self, fixed: dict[str, Any]) -> list[dict[str, str]]:
        """The rows that have these values; of a list, any."""
        rows = self.rows
        for name, given in fixed.items():
            column = self.column(name)
            wanted = given if isinstance(given, list) else [given]
            rows = [row for row in rows if any(_same(value, row[column]) for value in wanted)]
        return rows


@cache
def read(file: str) -> Figures:
    """A file of published figures.

    Raises:
        TableError: there is none of this name; naming those that there are.
    """
    known = sorted(path.name for path in FOLDER.glob("*.csv"))
    if file not in known:
        raise TableError(f"no published figures {file!r}{nearest(file, known)}")
    with (FOLDER / file).open(encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines)
        return Figures(file, list(reader.fieldnames or []), list(reader))


def _same(value: Any, text: str) -> bool:
    """Whether a parameter's value is what a file calls it: 128 and 128.0, 2.7b and 2.7B, bf16 and
    bfloat16."""
    told, text = format_scalar(value).strip().casefold(), text.strip().casefold()
    if _DTYPES.get(told, told) == _DTYPES.get(text, text):
        return True
    try:
        return float(told) == float(text)
    except ValueError:
        return False


def entry_problems(published: Published) -> list[tuple[tuple[str | int, ...], str]]:
    """What is wrong with a table's `published` entry by itself: its place in it, and why."""
    try:
        figures = read(published.file)
    except TableError as error:
        return [(("file",), str(error))]
    places: list[tuple[tuple[str | int, ...], str]] = [(("value",), published.value)]
    places += [(("on", name), column) for name, column in published.on.items()]
    places += [(("where", name), name) for name in published.where]
    found = []
    for place, column in places:
        try:
            figures.column(column)
        except TableError as error:
            found.append((place, str(error)))
    for name, given in published.where.items():
        has = list(dict.fromkeys(row[name] for row in figures.rows if name in row))
        for value in given if isinstance(given, list) else [given]:
            if has and not any(_same(value, text) for text in has):
                what = f"{published.file} has no {name} {format_scalar(value)!r}"
                found.append((("where", name), what + nearest(format_scalar(value), has)))
    return found


def published_columns(
    published: Published, dims: list[str], keys: list[tuple[Any, ...]]
) -> dict[str, list[str]]:
    """The columns that published figures add to a table: of each source and GPU that has any for
    these rows, a text a row, blank where it has none.

    Args:
        dims: the names of a row's key.
        keys: the rows; of equal ones in a row, as a list's, only the first gets a figure.

    Raises:
        TableError: a file or column that is not there; several figures for one place.
    """
    figures = read(published.file)
    figures.column(published.value)
    rows = figures.where(published.where)
    columns: dict[str, list[str]] = {}
    for i, key in enumerate(keys):
        if i and key == keys[i - 1]:
            continue
        place = dict(zip(dims, key, strict=True))
        for origin, found in _by_origin(figures, published, rows, place).items():
            header = f"{published.label or published.value} ({origin})"
            columns.setdefault(header, [""] * len(keys))[i] = found
    return columns


def _by_origin(
    figures: Figures, published: Published, rows: list[dict[str, str]], place: dict[str, Any]
) -> dict[str, str]:
    """For one row of a table, the figure of each source that has one."""
    # What `where` fixes is not repeated for rows that are of something else by the same name.
    for name, given in published.where.items():
        if name in place and name not in published.on:
            wanted = given if isinstance(given, list) else [given]
            if not any(_same(place[name], format_scalar(value)) for value in wanted):
                return {}
    found: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        fits = all(_same(place[name], row[figures.column(c)]) for name, c in published.on.items())
        if fits and row[published.value]:
            found.setdefault(_origin(figures, row), []).append(row)
    for origin, several in found.items():
        if len(several) > 1:
            raise TableError(_ambiguous(figures, origin, several))
    return {origin: row[published.value] for origin, (row,) in found.items()}


def _origin(figures: Figures, row: dict[str, str]) -> str:
    """Who published a figure, and of which GPU."""
    source = row.get("source") or figures.file.removesuffix(".csv")
    gpu = row.get("gpu", _UNSTATED)
    return f"{source}, {'GPU unstated' if gpu == _UNSTATED else gpu}"


def _ambiguous(figures: Figures, what: str, rows: list[dict[str, str]]) -> str:
    """Several rows where one is wanted: what tells them apart."""
    differ = [
        f"{name} ({', '.join(dict.fromkeys(row[name] for row in rows))})"
        for name in figures.columns
        if not name.endswith(_MEASURED) and len({row[name] for row in rows}) > 1
    ]
    told = ", ".join(differ) or "what was measured only"
    return f"{figures.file} has {len(rows)} rows of {what}, which differ in {told}"


def figure(file: str, column: str, **where: Any) -> str | None:
    """The one figure in a column of a file, as printed, of the row with these values (of a list,
    any); None where there is none.

    Raises:
        TableError: a file or column that is not there; several figures.
    """
    figures = read(file)
    figures.column(column)
    rows = [row for row in figures.where(where) if row[column]]
    if len(rows) > 1:
        what = ", ".join(f"{name}={value}" for name, value in where.items()) or "any kind"
        raise TableError(_ambiguous(figures, what, rows))
    return rows[0][column] if rows else None
