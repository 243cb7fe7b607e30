"""Makes the columns of a table that show published figures, one for each source and GPU."""

from __future__ import annotations

from typing import Any

from jobs.errors import TableError
from jobs.formatting import format_scalar
from jobs.published.figures import FigureFile, Published, is_allowed, read_figures, same_value

_UNSTATED = "unstated"  # in the CSV files: the source does not give this value


def published_columns(
    published: Published, dimensions: list[str], keys: list[tuple[Any, ...]]
) -> dict[str, list[str]]:
    """Return the columns of published figures beside the rows of a table, by header.

    For each row, a key has the values of the dimensions, the parameters that identify it. Of
    consecutive rows with equal values, only the first gets a figure. A cell without one is empty.
    Raises TableError, also if several figures fit one cell.
    """
    file = read_figures(published.file)
    file.check_column(published.value)
    rows = file.matching_rows(published.where)
    columns: dict[str, list[str]] = {}
    for i, key in enumerate(keys):
        if i and key == keys[i - 1]:
            continue
        place = dict(zip(dimensions, key, strict=True))
        for origin, figure in _by_origin(file, published, rows, place).items():
            header = f"{published.label or published.value} ({origin})"
            columns.setdefault(header, [""] * len(keys))[i] = figure
    return columns


def _by_origin(
    file: FigureFile, published: Published, rows: list[dict[str, str]], place: dict[str, Any]
) -> dict[str, str]:
    """Return the figures, of `rows`, that belong to one row of a table, by their source and GPU.

    `place` has the parameters of the row of the table.
    """
    # The figures have the values in `where`. A table row with another value gets no figure.
    for name, given in published.where.items():
        is_fixed = name in place and name not in published.on
        if is_fixed and not is_allowed(given, format_scalar(place[name])):
            return {}
    found: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        fits = all(
            same_value(place[name], row[file.check_column(column)])
            for name, column in published.on.items()
        )
        if fits and row[published.value]:
            found.setdefault(_origin(file, row), []).append(row)
    for origin, several in found.items():
        if len(several) > 1:
            raise TableError(file.ambiguity(origin, several))
    return {origin: row[published.value] for origin, (row,) in found.items()}


def _origin(file: FigureFile, row: dict[str, str]) -> str:
    """Return the source and the GPU of a figure as text, for the header of its column."""
    source = row.get("source") or file.name.removesuffix(".csv")
    gpu = row.get("gpu", _UNSTATED)
    return f"{source}, {'GPU unstated' if gpu == _UNSTATED else gpu}"
