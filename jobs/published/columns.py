"""Makes the columns of published figures in a table: one column per source and GPU."""

from __future__ import annotations

from typing import Any

from jobs.errors import TableError
from jobs.formatting import format_scalar
from jobs.published.figures import FigureFile, Published, read_figures, same_value

_UNSTATED = "unstated"  # value of a property that the source does not give


def published_columns(
    published: Published, dimensions: list[str], keys: list[tuple[Any, ...]]
) -> dict[str, list[str]]:
    """Make the columns of published figures for the rows of a table.

    Args:
        published: an entry of the table's `published`.
        dimensions: the dimensions of a row key.
        keys: the row keys. Of consecutive equal keys, as in a table of a list, only the first gets
            a figure.

    Returns:
        The cells, one per row, by header. A cell without a figure is "".

    Raises:
        TableError: if the file or a column does not exist, or if several figures fit one cell.
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
    """Return the figures for one row of a table, by source and GPU.

    Args:
        file: the file of figures.
        published: an entry of the table's `published`.
        rows: the rows of the file that match `where`.
        place: the row key of the table, by dimension.
    """
    # A row of the table gets no figure if it has another value of a parameter that `where` fixes.
    for name, given in published.where.items():
        if name in place and name not in published.on:
            wanted = given if isinstance(given, list) else [given]
            if not any(same_value(place[name], format_scalar(value)) for value in wanted):
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
    """Return the source and the GPU of a figure, for the header of its column."""
    source = row.get("source") or file.name.removesuffix(".csv")
    gpu = row.get("gpu", _UNSTATED)
    return f"{source}, {'GPU unstated' if gpu == _UNSTATED else gpu}"
