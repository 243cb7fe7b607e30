"""Draws the plots of a sweep."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from functools import partial
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

from jobs.report.panels import Line, Panel, Panels, log_base, make_panels
from jobs.report.tables.notes import several_of
from jobs.report.views import Shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ImageFormat = Literal["png", "svg", "pdf"]
_STYLE: Any = {
    "text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": "figure",
    "pdf.fonttype": 42,  # TrueType: conferences refuse Type 3, the default
    "figure.titlesize": 10, "axes.titlesize": 9, "legend.fontsize": 8,
    "xtick.labelsize": 8, "ytick.labelsize": 8,
    "figure.constrained_layout.w_pad": 0.08,  # a browser may have a wider font
}  # fmt: skip
# Characters that XML must not contain
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_LONG = 40  # number of letters of all names below an axis from which they are rotated
LETTER = 0.075  # average width of a letter of a legend, in inches
_TICKS = 5  # largest number of labels on a logarithmic x axis


def plot_figure(shown: Shown, title: str = "") -> Figure | None:
    """Return the figure of one plot, or None if no run has a value for it.

    With a title, the figure names its devices, and in what its runs differ, below the title.

    Raises:
        TableError: if a prediction fails.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    plot = make_panels(shown)
    if plot is None:
        return None
    across = min(4, len(plot.panels))
    down = -(-len(plot.panels) // across)
    titles = [fill(panel.title, 45) for panel in plot.panels]
    width, height = (2.7, 2.3) if across > 1 else (5.5, 3.2)
    slanted = _slanted(plot)  # these names also are to the left of the panel
    width += max(0.0, 0.87 * slanted - 0.7)
    height += 0.15 * max(text.count("\n") for text in titles) + 0.5 * slanted
    figure = new_figure((width, height), plot.names, down, across)
    grid = figure.subplots(down, across, squeeze=False)
    for axes in grid.flat[len(plot.panels) :]:
        axes.set_visible(False)
    for axes, panel, text in zip(grid.flat, plot.panels, titles, strict=False):
        (_draw_bars if plot.has_bars else _draw_lines)(axes, plot, panel)
        axes.set_title(text)
        axes.grid(alpha=0.3)
        axes.set_xlabel(plot.x_label)
    for first, *_ in grid:
        first.set_ylabel(plot.y_label)
    mark: Any = Patch if plot.has_bars else partial(Line2D, [], [], marker="o")
    marks = [mark(color=color) for color in plot.names.values()]
    figure.legend(marks, list(plot.names), loc="outside right upper")
    if title:
        figure.set_figheight(figure.get_figheight() + 0.5)
        figure.suptitle(f"{title}\n{_basis(shown, plot)}", x=0.01, ha="left")
    return figure


def new_figure(
    panel: tuple[float, float], names: Iterable[str], down: int = 1, across: int = 1
) -> Figure:
    """Return an empty figure. Texts in figures are shown as they are, also in SVG.

    It has room for panels of about this size, in inches, and for a legend of names at the right.
    """
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(_STYLE)
    names = list(names)
    width = 0.7 + across * (panel[0] + 0.7) + max(map(len, names), default=0) * LETTER
    height = max(0.05 + down * (panel[1] + 0.85), 0.2 + 0.17 * len(names))
    return Figure((width, height), layout="constrained")


def image(figure: Figure, form: ImageFormat) -> bytes:
    """Return a figure as the content of a file. The texts of SVG are texts.

    The same figure gives the same bytes.
    """
    file = io.BytesIO()
    dates = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    figure.savefig(file, format=form, dpi=110, metadata=dates.get(form))
    content = file.getvalue()
    return _NOT_XML.sub("\ufffd", content.decode()).encode() if form == "svg" else content


def _draw_lines(axes: Axes, plot: Panels, panel: Panel) -> None:
    for line in panel.lines:
        axes.plot(line.x, line.y, marker="o", markersize=3, color=line.color, label=line.name)
        _draw_intervals(axes, line.x, line, line.color)
        for x, y, label in zip(line.x, line.y, line.labels, strict=True):
            if label:
                axes.annotate(label, (x, y), (3, 3), textcoords="offset points", fontsize=7)
    base = log_base(panel.xs)
    if base is not None:
        axes.set_xscale("log", base=base)
    if base is not None or (len(panel.xs) <= _TICKS and all(isinstance(x, int) for x in panel.xs)):
        every = -(-len(panel.xs) // _TICKS)
        last = len(panel.xs) - 1
        labels = [f"{x:,g}" if (last - i) % every == 0 else "" for i, x in enumerate(panel.xs)]
        axes.set_xticks(panel.xs, labels)
    _scale_y(axes, plot, panel)
    axes.minorticks_off()


def _draw_bars(axes: Axes, plot: Panels, panel: Panel) -> None:
    places = {x: i for i, x in enumerate(panel.xs)}
    width = 0.8 / len(plot.names)
    for line in panel.lines:
        at = []
        for x in line.x:  # the bars at one x are side by side around it, also if one is missing
            there = [each for each in panel.lines if x in each.x]
            at.append(places[x] + (there.index(line) - (len(there) - 1) / 2) * width)
        axes.bar(at, line.y, width, color=line.color, label=line.name)
        _draw_intervals(axes, at, line, "black")
    axes.set_xticks(list(places.values()))
    slant: dict[str, Any] = {"rotation": 30, "ha": "right"} if _are_long(panel) else {}
    axes.set_xticklabels(list(places), **slant)
    _scale_y(axes, plot, panel)


def _are_long(panel: Panel) -> bool:
    """Return whether the names below an axis must be rotated."""
    return len(panel.xs) * max(len(str(x)) for x in panel.xs) > _LONG


def _slanted(plot: Panels) -> float:
    """Return the length of the longest rotated name, in inches."""
    names = [len(str(x)) for panel in plot.panels if _are_long(panel) for x in panel.xs]
    return max(names, default=0) * LETTER if plot.has_bars else 0.0


def _draw_intervals(axes: Axes, xs: Sequence[float], line: Line, color: str) -> None:
    """Draw the intervals of a line."""
    points = zip(xs, line.intervals, strict=True)
    found = [(x, *ends) for x, ends in points if ends is not None]
    if found:
        axes.vlines(*zip(*found, strict=True), color=color, linewidth=1)


def _scale_y(axes: Axes, plot: Panels, panel: Panel) -> None:
    from matplotlib.ticker import LogLocator

    heights = panel.heights
    if plot.has_log_y:
        axes.set_yscale("log")
        is_short = max(heights) / min(heights) < 100
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if is_short else (1,)))
    else:
        ends = [end for line in panel.lines for each in line.intervals if each for end in each]
        low, high = min(heights + ends), max(heights + ends)
        axes.set_ylim(min(0.0, 1.05 * low), 1.05 * high if high > 0 else 1)
    axes.yaxis.set_major_formatter("{x:,g}")


def _basis(shown: Shown, plot: Panels) -> str:
    """Return the devices, and in what the runs differ that the plot does not tell apart."""
    records = [each.record for each in shown.results if each.record and each.status == "ok"]
    devices = dict.fromkeys(record.device for record in records)
    return ". ".join([", ".join(devices), *several_of(records, 2)])
