"""Computes the speed-up of a table's cells against those of its baseline column."""

from __future__ import annotations

from jobs.report.pivot import Cell, Pivot
from jobs.report.results import Key
from jobs.sweep.schema import Scalar


def speedup_column(
    pivot: Pivot, column: Key, baseline: dict[str, Scalar] | None
) -> list[str] | None:
    """Format a column's speed-up in each row; None for a baseline, and without one.

    Args:
        baseline: by column dimension, the value to compare with.
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
    """Format how many times better a cell is than its reference, or why there is no number."""
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
