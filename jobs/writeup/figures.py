"""Makes interactive figures: the plots of sweeps, and timelines that runs have drawn.

A figure is a dict that Plotly.js draws. It has the keys data and layout, and `ratios` for plots:
the y values of each trace relative to a reference series.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jobs.code.short_names import as_in_runs
from jobs.formatting import is_number
from jobs.report.panels import COLORS, Line, Panel, Panels, log_base, make_panels
from jobs.writeup.document import ShownPlot
from systems.plot_data import Spans, Stack

Figure = dict[str, Any]
_ACROSS = 3  # largest number of panels beside each other
_TICKS = 6  # largest number of labels on an x axis
_GAP = 0.09  # between panels, as a fraction of the width or height
_PANEL_HEIGHT = 300  # in pixels
_STEPS = 4000  # gaps that are shorter than this part of a timeline are not drawn
_SPAN_COLORS = {
    "computation, forward": "#56b4e9",
    "computation, backward": "#009e73",
    "computation, synchronize": "#8c6d31",
    "computation, optimizer": "#cc79a7",
    "communication, overlapped": "#e69f00",
    "communication, exposed": "#d55e00",
}


def plot_figure(shown: ShownPlot) -> Figure | None:
    """Return the figure of a plot. None if no run has a value for it.

    Raises:
        TableError: if the plot names an unknown parameter or has an invalid condition.
    """
    plot = make_panels(shown.shown)
    if plot is None:
        return None
    across = _across(len(plot.panels))
    layout = _panel_layout([panel.title for panel in plot.panels])
    if plot.has_bars:
        layout["barmode"] = "group"
    data: list[Figure] = []
    named: set[str] = set()
    for number, panel in enumerate(plot.panels, 1):
        axis = "" if number == 1 else str(number)
        for line in panel.lines:
            data.append(_trace(plot, line, axis, line.name not in named))
            named.add(line.name)
        _scale(layout, axis, panel)
        if number + across > len(plot.panels):  # the lowest panel of its column
            layout[f"xaxis{axis}"]["title"] = {"text": plot.x_label}
        if (number - 1) % across == 0:
            layout[f"yaxis{axis}"]["title"] = {"text": plot.y_label}
    return {"data": data, "layout": layout, **_ratios(shown, plot, data)}


def _trace(plot: Panels, line: Line, axis: str, is_named: bool) -> Figure:
    trace: Figure = {
        "x": [_plain(x) if isinstance(x, str) else x for x in line.x],
        "y": [float(f"{value:.6g}") for value in line.y],
        "name": _plain(line.name),
        "legendgroup": str(line.key),
        "showlegend": is_named,
        "xaxis": f"x{axis}",
        "yaxis": f"y{axis}",
        "hovertemplate": f"{plot.x_label} %{{x}}: %{{y:.4g}}",
    }
    if plot.has_bars:
        trace |= {"type": "bar", "marker": {"color": line.color}}
    else:
        trace |= {"line": {"color": line.color, "width": 2}, "marker": {"size": 6}}
        trace["mode"] = "lines+markers+text" if any(line.labels) else "lines+markers"
    if any(line.labels):
        trace |= {"text": list(map(_plain, line.labels)), "textposition": "top right"}
    if any(interval is not None for interval in line.intervals):
        points = list(zip(line.y, line.intervals, strict=True))
        trace["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": [0 if ends is None else ends[1] - y for y, ends in points],
            "arrayminus": [0 if ends is None else y - ends[0] for y, ends in points],
        }
    return trace


def _across(count: int) -> int:
    """Return how many of `count` panels are beside each other: at most 3, and 2 of 4."""
    return 2 if count == 4 else min(_ACROSS, count)


def _panel_layout(titles: list[str]) -> Figure:
    """Return a layout with one panel for each title."""
    across = _across(len(titles))
    down = -(-len(titles) // across)
    layout: Figure = {"height": 90 + _PANEL_HEIGHT * down, "annotations": [], "hovermode": "x"}
    gap = min(_GAP, 0.3 / down)
    for i, title in enumerate(titles):
        axis = "" if i == 0 else str(i + 1)
        column, row = i % across, i // across
        width, height = (1 - _GAP * (across - 1)) / across, (1 - gap * (down - 1)) / down
        left, top = column * (width + _GAP), 1 - row * (height + gap)
        layout[f"xaxis{axis}"] = {"domain": [left, left + width], "anchor": f"y{axis}"}
        layout[f"yaxis{axis}"] = {"domain": [max(0.0, top - height), top], "anchor": f"x{axis}"}
        if not title:  # the only panel
            continue
        layout["annotations"].append(
            {
                "text": _plain(title),
                "x": left + width / 2,
                "y": top,
                "xref": "paper",
                "yref": "paper",
                "xanchor": "center",
                "yanchor": "bottom",
                "showarrow": False,
            }
        )
    return layout


def _scale(layout: Figure, axis: str, panel: Panel) -> None:
    """Set logarithmic axes where the static plots have them."""
    if log_base(panel.xs):
        every = -(-len(panel.xs) // _TICKS)
        layout[f"xaxis{axis}"] |= {
            "type": "log", "tickvals": panel.xs,
            "ticktext": [f"{x:,g}" if i % every == 0 else "" for i, x in enumerate(panel.xs)],
        }  # fmt: skip
    elif not all(map(is_number, panel.xs)):
        layout[f"xaxis{axis}"]["type"] = "category"
    if panel.has_log_y:
        layout[f"yaxis{axis}"] |= {"type": "log", "dtick": 1}
    else:
        layout[f"yaxis{axis}"]["rangemode"] = "tozero"


def _ratios(shown: ShownPlot, plot: Panels, data: list[Figure]) -> Figure:
    """Return the y values of each trace divided by those of a reference in the same panel.

    The reference is the series of a baseline that a table of the sweep declares.
    """
    groups = list(dict.fromkeys(trace["legendgroup"] for trace in data))
    if len(groups) < 2 or shown.plot.against is not None:
        return {}
    baselines = {
        as_in_runs(value)
        for table in shown.study.tables.values()
        for value in (table.baseline or {}).values()
    }
    declared = [str(column) for column in plot.pivot.column_keys if baselines.intersection(column)]
    group = next((each for each in declared if each in groups), None)
    if group is None:
        return {}
    reference = {
        trace["yaxis"]: dict(zip(trace["x"], trace["y"], strict=True))
        for trace in data
        if trace["legendgroup"] == group
    }
    name = next(trace["name"] for trace in data if trace["legendgroup"] == group)
    ratios = []
    for trace in data:
        base = reference.get(trace["yaxis"], {})
        points = zip(trace["x"], trace["y"], strict=True)
        ratios.append([y / base[x] if base.get(x) else None for x, y in points])
    return {"ratios": {"to": name, "y": ratios, "label": f"{plot.y_label}, over {name}"}}


def drawn_figure(drawn: Stack | Spans) -> Figure:
    """Return the figure of a timeline that a run has drawn."""
    return _stack(drawn) if isinstance(drawn, Stack) else _spans(drawn)


def _stack(stack: Stack) -> Figure:
    data = [
        {
            "x": stack.x,
            "y": values,
            "name": _plain(name),
            "stackgroup": "memory",
            "mode": "none" if len(stack.x) > 1 else "markers",
            "line": {"shape": "hv"},
            "fillcolor": COLORS[i % len(COLORS)],
            "hovertemplate": "%{y:.4g}",
        }
        for i, (name, values) in enumerate(stack.layers.items())
    ]
    layout: Figure = {
        "height": 420,
        "hovermode": "x unified",
        "xaxis": {"title": {"text": _plain(stack.x_title)}},
        "yaxis": {"title": {"text": _plain(stack.y_title)}, "rangemode": "tozero"},
        "shapes": [
            {"type": "line", "x0": phase.start, "x1": phase.start, "yref": "paper", "y0": 0,
             "y1": 1, "line": {"dash": "dot", "width": 1, "color": "#888888"}}
            for phase in stack.phases
        ],
        "annotations": [
            {"x": (phase.start + phase.end) / 2, "y": 1, "yref": "paper", "yanchor": "bottom",
             "text": _plain(phase.name), "showarrow": False}
            for phase in stack.phases
        ],
    }  # fmt: skip
    return {"data": data, "layout": layout}


def _spans(spans: Spans) -> Figure:
    """Return a figure of time spans. A span is a bar that begins at its start."""
    data = []
    classes = dict.fromkeys(name for row in spans.rows.values() for name in row)
    ends = [end for row in spans.rows.values() for each in row.values() for _, end in each]
    gap = max(ends, default=0.0) / _STEPS
    for i, name in enumerate(classes):
        bars = [
            (row, start, end)
            for row, of_row in spans.rows.items()
            for start, end in _joined(of_row.get(name, []), gap)
        ]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": _plain(name),
                "y": [_plain(row) for row, _, _ in bars],
                "x": [round(end - start, 4) for _, start, end in bars],
                "base": [start for _, start, _ in bars],
                "marker": {
                    "color": _SPAN_COLORS.get(name, COLORS[i % len(COLORS)]),
                    "line": {"width": 0},
                },
                "hovertemplate": "%{base:.3f} ms, %{x:.3f} ms long",
            }
        )
    layout: Figure = {
        "height": 120 + 45 * len(spans.rows),
        "barmode": "overlay",
        "bargap": 0.2,
        "hovermode": "closest",
        "xaxis": {"title": {"text": _plain(spans.x_title)}},
        "yaxis": {
            "autorange": "reversed",
            "automargin": True,
            "categoryorder": "array",
            "categoryarray": [_plain(row) for row in spans.rows],
        },
    }
    return {"data": data, "layout": layout}


def _joined(spans: Sequence[tuple[float, float]], gap: float) -> list[tuple[float, float]]:
    """Join neighbours with a smaller gap, which no screen shows. A step has thousands of spans."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start - joined[-1][1] < gap:
            start, end = joined[-1][0], max(end, joined.pop()[1])
        joined.append((start, end))
    return joined


def _plain(text: str) -> str:
    """Escape a text for Plotly, which reads some HTML tags."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
