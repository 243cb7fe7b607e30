"""What the panels of a plot show: lines, colors, axes. `plots` draws them.

A plot has one panel for each value of its `facet` parameters, and in each panel one line for each
value of its `series` parameters. If x is no number, a line is drawn as bars.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any, TypeVar

from jobs.formatting import format_scalar, is_number
from jobs.frame.results import Key
from jobs.frame.rows import Interval
from jobs.report.tables.pivot import Pivot, make_pivot
from jobs.report.views import Shown
from jobs.sweep.views import Plot

LINEAR_SPAN = 20  # if y values span a larger ratio, the y axis is logarithmic
# Okabe and Ito's colors, which color-blind readers can tell apart, in an order of high contrast.
COLORS = (
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f",
    "#b2abd2", "#1a1a1a",
)  # fmt: skip
# An implementation has the same color in all plots. Those of one row have no plot in common.
_NAMES = (
    ("naive", "alone", "replicated", "fp32"),
    ("flash_triton", "bucketed", "blocks", "sharded", "bf16"),
    ("flash_hopper", "peer", "bf16_master"),
    ("sdpa_flash", "torch", "fsdp2", "tf32"),
    ("sdpa_cudnn", "torch_tuned", "fsdp2_prefetch", "torch_zero", "fp16"),
    ("flash_pytorch", "flat", "layers", "bf16_pure"),
    ("naive_compiled", "compiled", "overlapped"),
    ("sdpa_efficient", "sdpa"),
    ("flex",),
    ("flash_attn_4",),
)
_COLOR_OF = {name: COLORS[i] for i, names in enumerate(_NAMES) for name in names}
_WORDS = {"seq_len": "sequence length", "context_length": "context length in tokens"}
_UNITS = ("mb", "ms", "seconds")  # at the end of the name of a parameter
_Name = TypeVar("_Name")


@dataclass
class Line:
    """The values of one series in one panel, in the order of x."""

    name: str
    color: str
    x: list[Any] = field(default_factory=list)
    y: list[float] = field(default_factory=list)
    intervals: list[Interval | None] = field(default_factory=list)  # confidence intervals to draw
    labels: list[str] = field(default_factory=list)  # of the points; "" if x tells it


@dataclass
class Panel:
    title: str  # "" if it is the only one
    lines: list[Line]

    @property
    def xs(self) -> list[Any]:
        """The different x values. Numbers ascend."""
        xs = list(dict.fromkeys(x for line in self.lines for x in line.x))
        return sorted(xs) if all(map(is_number, xs)) else xs

    @property
    def heights(self) -> list[float]:
        """All y values."""
        return [y for line in self.lines for y in line.y]


@dataclass
class Panels:
    """A plot, ready to be drawn."""

    panels: list[Panel]
    x_label: str
    y_label: str

    @property
    def has_bars(self) -> bool:
        """Whether x values are texts, which no line connects."""
        return not all(is_number(x) for panel in self.panels for x in panel.xs)

    @property
    def has_log_y(self) -> bool:
        """Whether y is logarithmic: if positive values of a panel with lines span a large ratio.

        The panels have the same kind of axis, so that they can be compared. The height of a bar is
        its value.
        """
        spans = [(min(panel.heights), max(panel.heights)) for panel in self.panels]
        is_wide = any(0 < low < high / LINEAR_SPAN for low, high in spans)
        return is_wide and not self.has_bars and all(low > 0 for low, _ in spans)

    @property
    def names(self) -> dict[str, str]:
        """The color of each series that the legend names."""
        return {line.name: line.color for panel in self.panels for line in panel.lines}


def make_panels(shown: Shown) -> Panels | None:
    """Arrange the results of a plot in panels. Return None if no run has a value for it.

    Panels with one x value are left out if others have more.

    Raises:
        TableError: if a prediction fails.
    """
    plot, pivot = shown.view, make_pivot(shown)
    assert isinstance(plot, Plot)
    (metric,) = pivot.metrics
    names = pivot.row_names[:-1]  # the last one is x
    across = None if plot.against is None else _other(shown, plot.against)
    colors = colors_of({key: _COLOR_OF.get(_text(pivot, key)) for key in pivot.column_keys})
    panels = []
    for facet in _facets(pivot):
        values = zip(map(words, names), facet, strict=True)
        panel = Panel(", ".join(f"{name} {_text(pivot, (value,))}" for name, value in values), [])
        for column in pivot.column_keys:
            line = Line(_name(pivot, column) or metric.label, colors[column])
            _add_points(line, pivot, across, facet, column)
            if line.y:
                panel.lines.append(line)
        if panel.lines:
            panels.append(panel)
    if not panels:
        return None
    if across is None:
        panels = [panel for panel in panels if len(panel.xs) > 1] or panels
    x_label = words(plot.x) if across is None else across.metrics[0].header
    return Panels(panels, x_label, metric.header)


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


def colors_of(known: dict[_Name, str | None]) -> dict[_Name, str]:
    """Return known colors by key, with one that no other key has instead of each None."""
    free = cycle([color for color in COLORS if color not in known.values()] or COLORS)
    return {key: color or next(free) for key, color in known.items()}


def words(name: str) -> str:
    """Return the name of a parameter as a reader says it, such as `size (MB)` for size_mb."""
    if name in _WORDS:
        return _WORDS[name]
    start, _, unit = name.rpartition("_")
    if start and unit in _UNITS:
        return f"{start.replace('_', ' ')} ({unit.upper() if unit == 'mb' else unit})"
    return name.replace("_", " ")


def _other(shown: Shown, metric: str) -> Pivot:
    """Return the pivot of another metric of the same runs."""
    view = shown.view.model_copy(update={"value": metric, "unit": None})
    return make_pivot(replace(shown, view=view))


def _text(pivot: Pivot, key: Key) -> str:
    return " ".join(pivot.names.get(value) or format_scalar(value) for value in key)


def _name(pivot: Pivot, column: Key) -> str:
    """Return the name of a series, whose numbers and truth values say what they are."""
    parts = []
    for name, value in zip(pivot.column_names, column, strict=True):
        if isinstance(value, bool):
            parts.append(words(name) if value else f"no {words(name)}")
        else:
            text = _text(pivot, (value,))
            parts.append(f"{words(name)} {text}" if is_number(value) else text)
    return ", ".join(parts)


def _facets(pivot: Pivot) -> list[Key]:
    """Return the values of the facets. Numbers ascend, others have the order of the sweep file."""
    facets = list(dict.fromkeys(key[:-1] for key in pivot.row_keys))
    orders = []
    for values in map(dict.fromkeys, zip(*facets, strict=True)):
        orders.append(sorted(values) if all(map(is_number, values)) else list(values))
    return sorted(
        facets, key=lambda facet: [o.index(x) for o, x in zip(orders, facet, strict=True)]
    )


def _add_points(line: Line, pivot: Pivot, across: Pivot | None, facet: Key, column: Key) -> None:
    """Add the cells of a column to its line, those of the rows of one facet.

    If an x value is not a number, all x values are text, in the order of the sweep file. `across`
    has the x values of a plot with `against`, whose points are labelled.
    """
    numeric = all(is_number(row[-1]) for row in pivot.row_keys)
    points = []
    for row in pivot.row_keys:
        cell = pivot.cells.get((row, column))
        if cell is None or cell.number is None or row[:-1] != facet:
            continue
        text, interval = _text(pivot, row[-1:]), cell.interval
        if interval is not None:  # that of few processes would fill the panel
            reach = abs(cell.number) / 2
            low, high = (
                min(max(end, cell.number - reach), cell.number + reach) for end in interval
            )
            interval = low, high
        if across is None:
            points.append((row[-1] if numeric else text, cell.number, interval, ""))
            continue
        other = across.cells.get((row, column))
        if other is not None and other.number is not None:
            points.append((other.number, cell.number, interval, text))
    if numeric or across is not None:
        points.sort(key=lambda point: point[0])
    for x, y, interval, label in points:
        line.x.append(x)
        line.y.append(y)
        line.intervals.append(interval)
        line.labels.append(label if len(points) > 1 else "")  # else the legend tells it
