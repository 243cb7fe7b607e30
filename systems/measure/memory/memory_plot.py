"""Draw GPU memory over time, from a timeline of torch's CUDA allocator, and give the drawn data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from systems.measure.memory.memory_timeline import KINDS, Owner, Timeline, kinds
from systems.plot_data import MAX_POINTS, Interval, Stack

# Paul Tol's bright color scheme, which is safe for color-blind readers.
_COLOURS = {
    "weights": "#4477aa", "optimizer state": "#66ccee", "gradients": "#228833",
    "activations": "#ee6677", "temporaries": "#ccbb44", "before": "#bbbbbb",
}  # fmt: skip
# Minimum width of a phase in the figure, as a fraction of all events. Without it, a phase with few
# or no allocations would be invisible, such as the optimizer phase.
_NARROWEST = 0.1


def draw_timeline(timeline: Timeline, owners: Sequence[Owner], title: str, path: Path) -> None:
    """Draw the GPU memory in use over time as a PNG file, stacked by kind as in `timeline_data`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Short phases are widened. In the added width, the memory in use is drawn as constant.
    x, times, edges = _axis(timeline)
    layers = _layers(timeline, owners, times)
    time, peak = timeline.peak()
    figure = Figure(figsize=(10, 5), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.add_subplot()
    panel.stackplot(
        x, *layers.values(), labels=list(layers), colors=[_COLOURS[k] for k in layers], step="post",
        linewidth=0,
    )  # fmt: skip
    panel.step(
        x, timeline.active_bytes()[times] / 2**30, where="post", color="black", linewidth=0.8,
        label="total",
    )  # fmt: skip
    top = peak / 2**30
    panel.set_ylim(0, top * 1.18 or 1)
    panel.set_xlim(x[0], x[-1])
    for i, phase in enumerate(timeline.phases):
        panel.axvspan(edges[i], edges[i + 1], color="#eeeeee" if i % 2 else "white", zorder=0)
        panel.text(
            (edges[i] + edges[i + 1]) / 2, 0.985, phase.name, ha="center", va="top",
            transform=panel.get_xaxis_transform(),
        )  # fmt: skip
        panel.axvline(edges[i], color="black", linewidth=0.6, linestyle=":")
    at = float(x[int(np.flatnonzero(times == time)[0])])
    panel.plot([at], [top], marker="v", color="black", markersize=5)
    right = at > (x[0] + x[-1]) / 2
    panel.annotate(
        f"peak {top:.4g} GiB", (at, top), xytext=(-7 if right else 7, 3),
        textcoords="offset points", ha="right" if right else "left", va="bottom",
    )  # fmt: skip
    panel.set_xticks([])
    panel.set_xlabel(f"{timeline.events:,} allocations and frees in order")
    panel.set_ylabel("memory in use (GiB)")
    panel.set_title(title, fontsize=10)
    figure.legend(loc="outside right upper", fontsize=9, reverse=True)
    figure.savefig(path, dpi=110)


def timeline_data(timeline: Timeline, owners: Sequence[Owner], title: str) -> Stack:
    """Return the GPU memory in use over time, by kind such as activations, in GiB.

    If the timeline has more than `MAX_POINTS` events, it is divided into parts with an equal number
    of events. Of each part, the time is kept at which the most bytes are in use. Owners are the
    tensors of the kinds weights, gradients and optimizer state.
    """
    total = timeline.active_bytes()
    parts = np.array_split(np.arange(len(total)), min(MAX_POINTS, len(total)))
    times = np.array([part[total[part].argmax()] for part in parts])
    layers = _layers(timeline, owners, times)
    return Stack(
        title=title,
        x_title="allocations and frees in order",
        y_title="memory in use (GiB)",
        x=times.tolist(),
        layers={kind: layer.round(4).tolist() for kind, layer in layers.items()},
        phases=[Interval(name=p.name, start=p.start, end=p.end) for p in timeline.phases],
    )


def _layers(
    timeline: Timeline, owners: Sequence[Owner], times: np.ndarray
) -> dict[str, np.ndarray]:
    """Return the GiB in use at some times, by kind. Kinds that are never in use are left out."""
    named = kinds(timeline, owners)
    layers = {
        kind: timeline.active_bytes([name == kind for name in named])[times] / 2**30
        for kind in KINDS
    }
    return {kind: layer for kind, layer in layers.items() if layer.any()}


def _axis(timeline: Timeline) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """Return the x axis of the figure, on which short phases are widened.

    The result is the x positions of the curves, the time at each (in allocator events), and the x
    positions of the phase boundaries.
    """
    narrowest = max(1.0, _NARROWEST * timeline.events)
    x: list[float] = []
    times: list[int] = []
    edges = [0.0]
    for phase in timeline.phases:
        length = phase.end - phase.start
        x += [edges[-1] + i for i in range(length + 1)]
        times += range(phase.start, phase.end + 1)
        edges.append(edges[-1] + max(length, narrowest))
    return np.array([*x, edges[-1]]), np.array([*times, times[-1]]), edges
