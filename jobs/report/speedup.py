"""Computes the speedup of table cells relative to a baseline column."""

from __future__ import annotations

from jobs.code.short_names import as_in_runs
from jobs.report.pivot import Cell, Pivot
from jobs.report.results import Key
from jobs.sweep.schema import Scalar


def speedup_column(
    pivot: Pivot, column: Key, baseline: dict[str, Scalar] | None
) -> list[str] | None:
    """Return the speedups of a column relative to the baseline column, as one text per row.

    Args:
        pivot: the table.
        column: key of the column, which has one value for each column dimension of the table.
        baseline: dimensions and their values in the baseline column, such as
            {"implementation": "naive"}. In all other dimensions, the baseline column has the same
            values as `column`.

    Returns:
        One text per row. None if the table has no baseline column, or if `column` is the baseline
        column.
    """
    if not baseline:
        return None
    base = tuple(
        as_in_runs(baseline.get(name, own)) for name, own in zip(pivot.columns, column, strict=True)
    )
    if base == column or base not in pivot.column_keys:
        return None
    return [
        _speedup(pivot.cells.get((row, column)), pivot.cells.get((row, base)), pivot.view.statistic)
        for row in pivot.row_keys
    ]


def _speedup(cell: Cell | None, reference: Cell | None, statistic: str) -> str:
    """Return the speedup of a cell relative to the cell of the baseline, such as `1.50x`.

    A speedup above 1 means that `cell` is better than the baseline: it has a lower time or a higher
    rate. Without a cell, the result is "". If one of the two cells has no number, or the number is
    zero, the result is the reason or a dash.

    Args:
        cell: the cell, or None if there is none.
        reference: cell of the baseline in the same row, or None if there is none.
        statistic: statistic of the samples that is compared, such as median.
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
