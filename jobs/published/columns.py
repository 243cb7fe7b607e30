"""Makes the columns that published figures add to a table: one for each source and GPU."""

from __future__ import annotations

from typing import Any

from jobs.errors import TableError
from jobs.formatting import format_scalar
from jobs.published.figures import FigureFile, Published, read_figures, same_value

_UNSTATED = "unstated"  # what a source does not say


def published_columns(
    published: Published, dimensions: list[str], keys: list[tuple[Any, ...]]
) -> dict[str, list[str]]:
    """Make the columns for these rows: a text a row, blank where there is no figure.

    Args:
        dimensions: the names of a row's key.
        keys: the rows; of equal ones in a row, as a list's, only the first gets a figure.

    Raises:
        TableError: a file or column that is not there; several figures for one place.
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
    """For one row of a table, the figure of each source that has one."""
    # What `where` fixes is not repeated for rows that are of something else by the same name.
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
    """Who published a figure, and of which GPU."""
    source = row.get("source") or file.name.removesuffix(".csv")
    gpu = row.get("gpu", _UNSTATED)
    return f"{source}, {'GPU unstated' if gpu == _UNSTATED else gpu}"
