"""Draws timelines from the data that a run has kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jobs.report.panels import colors_of
from jobs.report.plots import LETTER, new_figure
from systems.plot_data import Spans, Stack

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A layer or a class of spans has the same color in all figures.
_COLOR_OF = {
    "computation, forward": "#56b4e9",
    "computation, backward": "#009e73",
    "computation, synchronize": "#8c6d31",
    "computation, optimizer": "#cc79a7",
    "computation, graph": "#0072b2",
    "communication, overlapped": "#e69f00",
    "communication, exposed": "#d55e00",
    "weights": "#0072b2",
    "optimizer state": "#d55e00",
    "gradients": "#009e73",
    "activations": "#cc79a7",
    "temporaries": "#e69f00",
    "before": "#56b4e9",
}
_NARROWEST = 1 / 4000  # shorter gaps, as a part of the timeline, are not drawn


def timeline_figure(data: Stack | Spans, title: str = "") -> Figure:
    """Return the figure of a timeline."""
    figure = _stack(data) if isinstance(data, Stack) else _spans(data)
    figure.suptitle(title, x=0.01, ha="left")
    return figure


def _stack(stack: Stack) -> Figure:
    figure = new_figure((7.0, 3.7), stack.layers)
    axes = figure.subplots()
    layers = []
    if stack.layers and stack.x:
        # The last value lasts as long as the others do on average.
        x = [*stack.x, stack.x[-1] + ((stack.x[-1] - stack.x[0]) / len(stack.x) or 1)]
        values = [[*each, each[-1]] for each in stack.layers.values()]
        colors = colors_of({name: _COLOR_OF.get(name) for name in stack.layers}).values()
        layers = axes.stackplot(x, *values, colors=list(colors), step="post", linewidth=0)
    for phase in stack.phases:
        axes.axvline(phase.start, color="#888888", linewidth=1, linestyle=":")
        axes.annotate(
            phase.name, ((phase.start + phase.end) / 2, 1), xycoords=("data", "axes fraction"),
            xytext=(0, 3), textcoords="offset points", fontsize=8, ha="center",
        )  # fmt: skip
    totals = [sum(values) for values in zip(*stack.layers.values(), strict=True)]
    if totals:
        peak = max(totals)
        axes.set_ylim(0, 1.15 * peak or 1)
        at = stack.x[totals.index(peak)]
        side = "right" if at > (stack.x[0] + stack.x[-1]) / 2 else "left"
        axes.annotate(f"peak {peak:.4g}", (at, peak), (0, 6), textcoords="offset points", ha=side)
        axes.plot(at, peak, marker="v", color="black", markersize=5)
    axes.margins(x=0)
    axes.set_xlabel(stack.x_title)
    axes.set_ylabel(stack.y_title)
    figure.legend(
        layers, list(stack.layers)[: len(layers)], loc="outside right upper", reverse=True
    )
    return figure


def _spans(spans: Spans) -> Figure:
    """Draw a bar for each span, from its start to its end."""
    from matplotlib.patches import Patch

    names = dict.fromkeys(name for row in spans.rows.values() for name in row)
    longest = max(map(len, spans.rows), default=0)
    height = 0.2 + 0.3 * max(len(spans.rows), 1)
    figure = new_figure((6.35 + longest * LETTER, height), names)
    axes = figure.subplots()
    colors = colors_of({name: _COLOR_OF.get(name) for name in names})
    found = [span for row in spans.rows.values() for each in row.values() for span in each]
    times = [time for span in found for time in span]
    gap = (max(times, default=0.0) - min(times, default=0.0)) * _NARROWEST
    for i, row in enumerate(spans.rows.values()):
        for name, found in row.items():
            bars = [(start, end - start) for start, end in _joined(found, gap)]
            axes.broken_barh(bars, (i - 0.4, 0.8), color=colors[name], linewidth=0)
    axes.set_yticks(range(len(spans.rows)), list(spans.rows))
    axes.set_ylim(len(spans.rows) - 0.4, -0.6)
    axes.margins(x=0)
    axes.set_xlabel(spans.x_title)
    figure.legend(
        [Patch(color=color) for color in colors.values()], colors, loc="outside right upper"
    )
    return figure


def _joined(spans: list[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """Join neighbours with a smaller gap, which no screen shows. A step has thousands of spans."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start - joined[-1][1] < gap:
            start, end = joined[-1][0], max(end, joined.pop()[1])
        joined.append((start, end))
    return joined
