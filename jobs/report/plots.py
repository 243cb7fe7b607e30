"""Plots of a sweep: one figure a plot, one panel a facet, one line a series."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jobs.formatting import format_scalar, is_number
from jobs.report.entries import Entry
from jobs.report.tables import Filled, fill
from jobs.status import Observation
from jobs.sweep.schema import Plot

_LINEAR_SPAN = 20  # values within a factor of this are readable on a linear axis


def draw(
    observation: Observation, plot: Plot, folder: Path, chosen: list[Entry] | None = None
) -> Path | None:
    """Draw one plot as PNG; None where nothing was measured. Axes are logarithmic, base 2 or 10,
    where the grid is powers of two or ten."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    filled = fill(observation, plot, chosen)
    x_at = filled.rows.index(plot.x)
    facets = list(dict.fromkeys(_without(key, x_at) for key in filled.row_keys))
    lines = {facet: _lines(filled, facet, x_at) for facet in facets}
    facets = [facet for facet in facets if lines[facet]]
    if not facets:
        return None
    across = min(4, len(facets))
    down = -(-len(facets) // across)
    figure, panels = plt.subplots(
        down,
        across,
        figsize=(max(6, 3.6 * across), max(4, 3.1 * down)),
        squeeze=False,
        layout="constrained",
    )
    colours = {column: f"C{i % 10}" for i, column in enumerate(filled.column_keys)}
    names = [name for i, name in enumerate(filled.rows) if i != x_at]
    (value,) = filled.values
    for panel in panels.flat[len(facets) :]:
        panel.set_visible(False)
    for panel, facet in zip(panels.flat, facets, strict=False):
        heights: list[float] = []
        xs: list[Any] = []
        for column, (x, y) in lines[facet].items():
            label = " ".join(map(format_scalar, column)) or value.label
            panel.plot(x, y, marker="o", markersize=3, color=colours[column], label=label)
            heights += y
            xs += x
        base = _log_base(sorted(set(xs)))
        if base:
            panel.set_xscale("log", base=base)
        if min(heights) > 0 and max(heights) / min(heights) > _LINEAR_SPAN:
            panel.set_yscale("log")
        else:
            panel.set_ylim(0, 1.05 * max(heights) or 1)
        panel.set_title(
            ", ".join(f"{n} {format_scalar(v)}" for n, v in zip(names, facet, strict=True)),
            fontsize=9,
            parse_math=False,
        )
        panel.grid(alpha=0.3)
        panel.set_xlabel(plot.x)
    for row in panels:
        row[0].set_ylabel(value.header)
    handles = {  # of every panel: not each has all series
        label: handle
        for panel in panels.flat
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    legend = figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=8)
    for text in legend.get_texts():
        text.set_parse_math(False)
    device = ", ".join(
        {record.device: None for record in observation.records if record.status == "ok"}
    )
    figure.suptitle(f"{plot.title or plot.name}\n{device}", fontsize=10, parse_math=False)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{plot.name}.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _without(key: tuple[Any, ...], index: int) -> tuple[Any, ...]:
    return key[:index] + key[index + 1 :]


def _lines(
    filled: Filled, facet: tuple[Any, ...], x_at: int
) -> dict[Any, tuple[list[Any], list[float]]]:
    """By column, the positions and heights of its line in one panel: numbers in their order, others
    as text, in the sweep's."""
    numeric = all(is_number(row[x_at]) for row in filled.row_keys)
    result = {}
    for column in filled.column_keys:
        points = []
        for row in filled.row_keys:
            cell = filled.cells.get((row, column))
            number = cell.number(filled.view.statistic) if cell else None
            if _without(row, x_at) == facet and number is not None:
                x = (
                    row[x_at] if numeric else format_scalar(row[x_at]).replace("$", r"\$")
                )  # no formula
                points.append((x, number))
        if points:
            if numeric:
                points.sort()
            result[column] = ([x for x, _ in points], [y for _, y in points])
    return result


def _log_base(xs: list[Any]) -> int | None:
    """2 or 10 where the positions are powers of it, else None."""
    if len(xs) < 3 or not all(is_number(x) and x > 0 for x in xs):
        return None
    if all(isinstance(x, int) and x & (x - 1) == 0 for x in xs):
        return 2
    if all(float(f"{x:e}".split("e")[0]) == 1 for x in xs):
        return 10
    return None
