"""Reads published figures from the CSV files in the folder of this module.

Published figures are values that other authors measured, on other machines and with other settings.
A table shows each figure exactly as it was printed, below its source and GPU.
"""

from __future__ import annotations

import csv
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
_UNSTATED = "unstated"  # in the CSV files: the source does not give this value
_MEASURED = ("_ms", "_mib", "_gib", "_percent")  # suffixes of columns with measured values


class Published(BaseModel):
    """Selects published figures: an entry of the key `published` of a table in a sweep file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]+\.csv$")]  # in this folder
    value: str  # column to show
    on: Annotated[dict[str, str], Field(min_length=1)]  # row parameter -> column of the file
    where: dict[str, Scalar | list[Scalar]] = {}  # required values of other columns
    label: str | None = None  # header of the column in the table; default: `value`


Row = dict[str, str]  # of a CSV file, by column


@cache
def read_figures(file: str) -> list[Row]:
    """Read a CSV file, given by its name without the folder. Raises TableError if there is none."""
    known = sorted(path.name for path in FOLDER.glob("*.csv"))
    if file not in known:
        raise TableError(f"there is no file of published figures {file!r}{nearest(file, known)}")
    with (FOLDER / file).open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def published_columns(
    published: Published, dimensions: list[str], keys: list[tuple[Any, ...]]
) -> dict[str, list[str]]:
    """Return the columns of published figures beside the rows of a table, by header.

    For each row, a key has the values of the dimensions, the parameters that identify it. Of
    consecutive rows with equal values, only the first gets a figure. A cell without one is empty.
    Raises TableError, also if several figures of one source and GPU fit one cell.
    """
    file = published.file
    figures = _matching(file, _rows_with(file, published.value), published.where)
    columns: dict[str, list[str]] = {}
    for i, key in enumerate(keys):
        place = dict(zip(dimensions, key, strict=True))
        # The figures have the values in `where`. A table row with another value gets no figure.
        fixed = published.where.keys() & place.keys() - published.on.keys()
        others = [n for n in fixed if not _allowed(published.where[n], format_scalar(place[n]))]
        if others or (i and key == keys[i - 1]):
            continue
        fitting = figures
        for name, column in published.on.items():
            fitting = _matching(file, fitting, {column: place[name]})
        by_origin: dict[str, list[Row]] = {}
        for row in fitting:
            by_origin.setdefault(_origin(file, row), []).append(row)
        for origin, rows in by_origin.items():
            header = f"{published.label or published.value} ({origin})"
            figure = _only(file, origin, rows)[published.value]
            columns.setdefault(header, [""] * len(keys))[i] = figure
    return columns


def published_figure(file: str, column: str, **where: Any) -> str:
    """Return one published figure as printed.

    `where` has conditions on other columns: the required value, or a list of allowed values.
    Raises TableError, also if no figure matches, or several.
    """
    rows = _matching(file, _rows_with(file, column), where)
    what = ", ".join(f"{name}={format_scalar(value)}" for name, value in where.items())
    if not rows:
        raise TableError(f"{file} has no {column} for {what or 'any row'}")
    return _only(file, what or "any kind", rows)[column]


def published_problems(published: Published) -> list[tuple[tuple[str | int, ...], str]]:
    """Return the errors in settings: the path of the key within them, and the message."""
    try:
        rows = read_figures(published.file)
    except TableError as error:
        return [(("file",), str(error))]
    places: list[tuple[tuple[str | int, ...], str]] = [(("value",), published.value)]
    places += [(("on", name), column) for name, column in published.on.items()]
    places += [(("where", name), name) for name in published.where]
    found = []
    for place, column in places:
        try:
            _check_column(published.file, column)
        except TableError as error:
            found.append((place, str(error)))
    for name, given in published.where.items():
        has = list(dict.fromkeys(row[name] for row in rows if name in row))
        for value in given if isinstance(given, list) else [given]:
            if has and not any(_same(value, text) for text in has):
                what = f"{published.file} has no row with {name} {format_scalar(value)!r}"
                found.append((("where", name), what + nearest(format_scalar(value), has)))
    return found


def _rows_with(file: str, figure: str) -> list[Row]:
    """Return the rows of a file that have a figure in a column."""
    _check_column(file, figure)
    return [row for row in read_figures(file) if row[figure]]


def _matching(file: str, rows: list[Row], conditions: dict[str, Any]) -> list[Row]:
    """Return the rows whose columns have the required value, or one of a list."""
    for name, given in conditions.items():
        _check_column(file, name)
        rows = [row for row in rows if _allowed(given, row[name])]
    return rows


def _check_column(file: str, name: str) -> None:
    """Raise TableError if a file has no such column."""
    columns = list(read_figures(file)[0])
    if name not in columns:
        raise TableError(f"{file} has no column {name!r}{nearest(name, columns)}")


def _only(file: str, what: str, rows: list[Row]) -> Row:
    """Return the only row of a selection, `what`. Raises TableError if there are several."""
    if len(rows) == 1:
        return rows[0]
    differ = [
        f"{name} ({', '.join(dict.fromkeys(row[name] for row in rows))})"
        for name in rows[0]
        if not name.endswith(_MEASURED) and len({row[name] for row in rows}) > 1
    ]
    raise TableError(
        f"{file} has {len(rows)} rows of {what}, which differ in "
        f"{', '.join(differ) or 'measured values only'}; select one row by these columns"
    )


def _allowed(given: Any, text: str) -> bool:
    """Return True if a text in a CSV file equals the required value, or one of a list."""
    return any(_same(value, text) for value in (given if isinstance(given, list) else [given]))


def _same(value: Any, text: str) -> bool:
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


def _origin(file: str, row: Row) -> str:
    """Return the source and the GPU of a figure as text, for the header of its column."""
    source = row.get("source") or file.removesuffix(".csv")
    gpu = row.get("gpu", _UNSTATED)
    return f"{source}, {'GPU unstated' if gpu == _UNSTATED else gpu}"
