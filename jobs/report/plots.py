"""Draws the plots of a sweep as PNG files.

A plot has one panel for each value of its `facet` parameters, and in each panel one line for each
value of its `series` parameters.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs.formatting import format_scalar, is_number
from jobs.frame.results import Key
from jobs.frame.rows import Interval
from jobs.report.tables.notes import differing, several_of
from jobs.report.tables.pivot import Pivot, make_pivot
from jobs.report.views import Shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINEAR_SPAN = 20  # if y values span a larger ratio, the y axis is logarithmic
# x and y values, and the confidence intervals of the y values, if there are
Line = tuple[list[Any], list[float], list[Interval | None]]


def draw_plot(shown: Shown, folder: Path) -> Path | None:
    """Draw one plot as a PNG file, and return its path, or None if no run has a value for it.

    The folder is created if it does not exist.

    Raises:
        TableError: if a prediction fails.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    pivot = make_pivot(shown)
    (metric,) = pivot.metrics
    x_index = len(pivot.row_names) - 1
    panels = panels_of(pivot, x_index)
    if not panels:
        return None
    across = min(4, len(panels))
    down = -(-len(panels) // across)
    figure, grid = plt.subplots(
        down,
        across,
        figsize=(max(6, 3.6 * across), max(4, 3.1 * down)),
        squeeze=False,
        layout="constrained",
    )
    colours = {column: f"C{i % 10}" for i, column in enumerate(pivot.column_keys)}
    names = without_index(tuple(pivot.row_names), x_index)
    text = partial(text_of, pivot)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (facet, lines) in zip(grid.flat, panels.items(), strict=False):
        for column, (x, y, intervals) in lines.items():
            label = " ".join(text(value) for value in column) or metric.label
            axes.plot(x, y, marker="o", markersize=3, color=colours[column], label=label)
            for position, interval in zip(x, intervals, strict=True):
                if interval is not None:
                    axes.vlines(position, *interval, color=colours[column], linewidth=1)
        _scale(axes, list(lines.values()))
        title = ", ".join(f"{n} {text(v)}" for n, v in zip(names, facet, strict=True))
        axes.set_title(title, fontsize=9, parse_math=False)
        axes.grid(alpha=0.3)
        axes.set_xlabel(pivot.row_names[x_index])
    for first, *_ in grid:
        first.set_ylabel(metric.header)
    _add_legend(figure)
    measured = (record.device for record in shown.observation.records if record.status == "ok")
    # The list of commits or versions is too long for a figure.
    dimensions = [*pivot.row_names, *pivot.column_names]
    notes = several_of(differing(shown.results), shown, dimensions)
    several = [note.partition(":")[0] for note in notes]
    below = ". ".join(filter(None, [", ".join(dict.fromkeys(measured)), *several]))
    figure.suptitle(f"{shown.title}\n{below}", fontsize=10, parse_math=False)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{shown.view.name}.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def text_of(pivot: Pivot, value: Any) -> str:
    return pivot.names.get(value) or format_scalar(value)


def panels_of(pivot: Pivot, x_index: int) -> dict[Key, dict[Key, Line]]:
    """Return the lines of each panel of a plot, by the values of its facet.

    Numeric facet values ascend. Other values have the order of the sweep file.

    The arguments are those of `lines_of`.
    """
    facets = list(dict.fromkeys(without_index(key, x_index) for key in pivot.row_keys))
    orders = []
    for values in map(dict.fromkeys, zip(*facets, strict=True)):
        numeric = all(isinstance(value, (int, float)) for value in values)
        orders.append(list(sorted(values) if numeric else values))
    facets.sort(key=lambda facet: [order.index(x) for order, x in zip(orders, facet, strict=True)])
    panels = {facet: lines_of(pivot, facet, x_index) for facet in facets}
    return {facet: lines for facet, lines in panels.items() if lines}


def without_index(key: Key, index: int) -> Key:
    return key[:index] + key[index + 1 :]


def lines_of(pivot: Pivot, facet: Key, x_index: int) -> dict[Key, Line]:
    """Return the values and intervals of each line in one panel of a plot, by column key.

    Numeric x values are sorted. If an x value is not a number, all x values are text, in the order
    of the sweep file. Each column of the pivot is one line, and each row one x value in one panel.
    A row key has this x value, at the position x_index, and the values of the `facet` parameters,
    which select the panel.
    """
    numeric = all(is_number(row[x_index]) for row in pivot.row_keys)
    lines = {}
    for column in pivot.column_keys:
        points = []
        for row in pivot.row_keys:
            cell = pivot.cells.get((row, column))
            if cell is None or cell.number is None:
                continue
            if without_index(row, x_index) == facet:
                x = row[x_index]
                # Escape `$`, because Matplotlib would read it as the start of a formula.
                position = x if numeric else text_of(pivot, x).replace("$", r"\$")
                points.append((position, cell.number, cell.interval))
        if points:
            if numeric:
                points.sort(key=lambda point: point[0])
            x_values, y_values, intervals = zip(*points, strict=True)
            lines[column] = (list(x_values), list(y_values), list(intervals))
    return lines


def _scale(axes: Axes, lines: list[Line]) -> None:
    """Set linear or logarithmic axes.

    The x axis is logarithmic if it has at least three values and all are powers of 2, or all are
    powers of 10. The y axis is logarithmic if all y values are positive and the largest is more
    than 20 times the smallest.
    """
    base = log_base(sorted({x for xs, _, _ in lines for x in xs}))
    heights = [y for _, ys, _ in lines for y in ys]
    if base:
        axes.set_xscale("log", base=base)
    if min(heights) > 0 and max(heights) / min(heights) > LINEAR_SPAN:
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, 1.05 * max(heights) or 1)


def log_base(xs: list[Any]) -> int | None:
    """Return the base of a logarithmic x axis, or None for a linear axis.

    The base is 2 or 10 if there are at least 3 x values and all of them are powers of this base.
    """
    if len(xs) < 3 or not all(is_number(x) and x > 0 for x in xs):
        return None
    if all(isinstance(x, int) and x & (x - 1) == 0 for x in xs):
        return 2
    if all(float(f"{x:e}".split("e")[0]) == 1 for x in xs):
        return 10
    return None


def _add_legend(figure: Figure) -> None:
    """Add one legend for the lines of all panels."""
    handles = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    legend = figure.legend(handles.values(), handles.keys(), loc="outside right upper", fontsize=8)
    for text in legend.get_texts():
        text.set_parse_math(False)
