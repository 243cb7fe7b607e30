"""Measure the time of a function that is called back to back for seconds.

A GPU under full load reaches its power limit within about a second and then lowers its clock. The
time over seconds is therefore longer than that of a short measurement.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import torch

from systems.measure.timing import Thunk, clock_ms
from systems.measure.windows import window

CHUNK_MS = 100.0  # duration of a sample, which is the mean of consecutive calls
WARMUP = 0.5  # duration of the warm-up, relative to that of the measurement
MAX_CALLS = 500  # maximum number of calls in a sample


def sustained_ms(
    fn: Thunk,
    device: torch.device,
    seconds: float,
    *,
    before: Thunk | None = None,
    phase: str | None = None,
) -> tuple[list[float], int]:
    """Call a function back to back, and return mean durations of its calls, and their number.

    A duration, in milliseconds, is the mean of consecutive calls over about 100 ms.

    Args:
        seconds: of the measurement. Half as long a warm-up comes before it.
        before: called before each call of `fn`, such as the forward pass before backward. The GPU
            executes it, too.
        phase: name under which the window of the measurement is noted, see `windows`.
    """
    chunk = _chunk(fn, device, before)
    once = max(sum(chunk(2)) / 2, 1e-3)
    count = max(1, min(int(CHUNK_MS / once), MAX_CALLS))
    _repeat(chunk, count, WARMUP * seconds)
    with window(phase):
        samples = _repeat(chunk, count, seconds)
    return [round(sum(times) / len(times), 6) for times in samples], count * len(samples)


def _repeat(chunk: Callable[[int], list[float]], count: int, seconds: float) -> list[list[float]]:
    end = time.monotonic() + seconds
    samples = [chunk(count)]
    while time.monotonic() < end:
        samples.append(chunk(count))
    return samples


def _chunk(fn: Thunk, device: torch.device, before: Thunk | None) -> Callable[[int], list[float]]:
    """Return a function that makes a number of calls and returns the time of each, in ms."""

    def on_cpu(count: int) -> list[float]:
        times = []
        for _ in range(count):
            if before is not None:
                before()
            times.append(clock_ms(fn, device))
        return times

    def on_gpu(count: int) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * count)]
        for start, end in zip(events[::2], events[1::2], strict=True):
            if before is not None:
                before()
            start.record()
            fn()
            end.record()
        events[-1].synchronize()
        return [start.elapsed_time(end) for start, end in list(pairwise(events))[::2]]

    return on_gpu if device.type == "cuda" else on_cpu
