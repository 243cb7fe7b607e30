"""The data of a figure of GPU memory over time, from a timeline of torch's CUDA allocator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from systems.measure.memory.memory_timeline import KINDS, Owner, Timeline, kinds
from systems.plot_data import MAX_POINTS, Interval, Stack


def timeline_data(timeline: Timeline, owners: Sequence[Owner], title: str) -> Stack:
    """Return the GPU memory in use over time, by kind such as activations, in GiB.

    More than `MAX_POINTS` events are divided into parts with an equal number of events, and the
    peak of each part is kept. Owners are the tensors of weights, gradients and optimizer state.
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
