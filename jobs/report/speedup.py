"""Computes the speed-up of the cells of a table relative to a baseline column."""

from __future__ import annotations

from jobs.report.pivot import Cell, Pivot
from jobs.report.results import Key
from jobs.sweep.schema import Scalar


def speedup_column(
    pivot: Pivot, column: Key, baseline: dict[str, Scalar] | None
) -> list[str] | None:
    """Return the speed-up of a column relative to the baseline, as text for each row.

    Args:
        pivot: the table.
        column: key of the column.
        baseline: the values of column dimensions that make a column the baseline, by dimension.

    Returns:
        The cells, or None if the table has no baseline or the column itself is the baseline.
    """
    if not baseline:
        return None
    base = tuple(baseline.get(name, own) for name, own in zip(pivot.columns, column, strict=True))
    if base == column:
        return None
    return [
        _speedup(pivot.cells.get((row, column)), pivot.cells.get((row, base)), pivot.view.statistic)
        for row in pivot.row_keys
    ]


def _speedup(cell: Cell | None, reference: Cell | None, statistic: str) -> str:
    """Return the speed-up of a cell over its reference, such as `1.50x`, or why there is none.

    A speed-up above 1 means that the cell is better: lower for times, higher for rates.
    """
    if cell is None:
        return ""
    if reference is None:
        return "no baseline"
    mine, theirs = cell.number(statistic), reference.number(statistic)
    if mine is None:
        return "–"
    if theirs is None:
        return f"baseline: {reference.text(statistic)}"
    if not mine or not theirs:
        return "–"
    ratio = theirs / mine if cell.metric.direction == "lower" else mine / theirs
    return f"{ratio:.2f}x"
