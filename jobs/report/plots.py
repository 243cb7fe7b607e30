"""Draws the plots of a sweep as PNG files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from jobs.report.panels import Panel, Panels, log_base, make_panels
from jobs.report.tables.notes import differing, several_of
from jobs.report.views import Shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_plot(shown: Shown, folder: Path) -> Path | None:
    """Draw one plot as a PNG file, and return its path, or None if no run has a value for it.

    The folder is created if it does not exist.

    Raises:
        TableError: if a prediction fails.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    plot = make_panels(shown)
    if plot is None:
        return None
    across = min(4, len(plot.panels))
    down = -(-len(plot.panels) // across)
    figure, grid = plt.subplots(
        down,
        across,
        figsize=(max(7.5, 3.6 * across), max(4, 3.1 * down)),
        squeeze=False,
        layout="constrained",
    )
    for axes in grid.flat[len(plot.panels) :]:
        axes.set_visible(False)
    for axes, panel in zip(grid.flat, plot.panels, strict=False):
        (_draw_bars if plot.has_bars else _draw_lines)(axes, plot, panel)
        axes.set_title(panel.title, fontsize=9, parse_math=False)
        axes.grid(alpha=0.3)
        axes.set_xlabel(plot.x_label, parse_math=False)
    for first, *_ in grid:
        first.set_ylabel(plot.y_label, parse_math=False)
    marks = [Line2D([], [], color=color, marker="o") for color in plot.names.values()]
    legend = figure.legend(marks, list(plot.names), loc="outside right upper", fontsize=8)
    for text in legend.get_texts():
        text.set_parse_math(False)
    figure.suptitle(f"{shown.title}\n{_basis(shown, plot)}", fontsize=10, parse_math=False)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{shown.view.name}.png"
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _draw_lines(axes: Axes, plot: Panels, panel: Panel) -> None:
    for line in panel.lines:
        axes.plot(line.x, line.y, marker="o", markersize=3, color=line.color, label=line.name)
        points = zip(line.x, line.y, line.intervals, line.labels, strict=True)
        for x, y, interval, label in points:
            if interval is not None:
                axes.vlines(x, *interval, color=line.color, linewidth=1)
            if label:
                axes.annotate(
                    label, (x, y), fontsize=7, textcoords="offset points", xytext=(3, 3),
                    parse_math=False,
                )  # fmt: skip
    if base := log_base(panel.xs):
        axes.set_xscale("log", base=base)
    _scale_y(axes, panel)


def _draw_bars(axes: Axes, plot: Panels, panel: Panel) -> None:
    places = {x: i for i, x in enumerate(panel.xs)}
    width = 0.8 / len(plot.names)
    for line in panel.lines:
        shift = (list(plot.names).index(line.name) + 0.5) * width - 0.4
        at = [places[x] + shift for x in line.x]
        axes.bar(at, line.y, width, color=line.color, label=line.name)
        for x, interval in zip(at, line.intervals, strict=True):
            if interval is not None:
                axes.vlines(x, *interval, color="black", linewidth=1)
    axes.set_xticks(list(places.values()))
    for text, x in zip(axes.set_xticklabels(list(places)), places, strict=True):
        text.set_parse_math(False)
        text.set(rotation=30 if len(str(x)) > 8 else 0, fontsize=8)
    _scale_y(axes, panel)


def _scale_y(axes: Axes, panel: Panel) -> None:
    if panel.has_log_y:
        axes.set_yscale("log")
    else:
        heights = [y for line in panel.lines for y in line.y]
        axes.set_ylim(min(0.0, 1.05 * min(heights)), 1.05 * max(heights) if max(heights) > 0 else 1)


def _basis(shown: Shown, plot: Panels) -> str:
    """Return the devices, and in what the runs differ that the plot does not tell apart."""
    measured = (record.device for record in shown.observation.records if record.status == "ok")
    # The list of commits or versions is too long for a figure.
    dimensions = [*plot.pivot.row_names, *plot.pivot.column_names]
    notes = several_of(differing(shown.results), shown, dimensions)
    several = [note.partition(":")[0] for note in notes]
    return ". ".join(filter(None, [", ".join(dict.fromkeys(measured)), *several]))
