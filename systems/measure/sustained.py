"""Measure the time of a function that is called back to back for seconds.

A GPU under full load reaches its power limit within about a second and then lowers its clock. The
time over seconds is therefore longer than that of a short measurement.

There are no holds. If the host needs longer to issue a call than the GPU to execute it, the time is
that of the host. Such a measurement is marked as launch-bound.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from systems.measure.timing import Thunk, clock_ms
from systems.measure.windows import window

CHUNK_MS = 100.0  # largest duration of a sample, which is the mean of consecutive calls
WARMUP = 0.5  # duration of the warm-up, relative to that of the measurement
MAX_CALLS = 500  # maximum number of calls in a sample
# Share of a sample's time until the host has issued its calls, from which the calls count as
# launch-bound. The driver queues about a thousand launches, then the host waits for the GPU. With
# less than 10,000 launches in a sample, the share of a busy GPU is therefore below 0.9.
LAUNCH_BOUND = 0.9
_Chunk = tuple[list[float], float]  # time of each call in ms, share of issuing


class Sustained(NamedTuple):
    """What `sustained_ms` measures."""

    samples_ms: list[float]  # means of the calls in about 100 ms, or of MAX_CALLS calls
    calls: int
    launch_bound: bool  # whether issuing the calls took about as long as executing them


def sustained_ms(
    fn: Thunk,
    device: torch.device,
    seconds: float,
    *,
    before: Thunk | None = None,
    phase: str | None = None,
) -> Sustained:
    """Call a function back to back, and return mean durations of its calls, and their number.

    Args:
        seconds: of the measurement. Half as long a warm-up comes before it.
        before: called before each call of `fn`, such as forward before backward; measured, too.
        phase: name under which the window of the measurement is noted, see `windows`.
    """
    chunk = _chunk(fn, device, before)
    once = max(sum(chunk(2)[0]) / 2, 1e-3)
    count = max(1, min(int(CHUNK_MS / once), MAX_CALLS))
    _repeat(chunk, count, WARMUP * seconds)
    with window(phase):
        samples = _repeat(chunk, count, seconds)
    return Sustained(
        [round(sum(times) / len(times), 6) for times, _ in samples],
        count * len(samples),
        statistics.median(share for _, share in samples) >= LAUNCH_BOUND,
    )


def facts_of(measured: dict[str, Sustained]) -> dict[str, Any]:
    """Return the facts sustained_calls and, if there are such phases, launch_bound."""
    launch_bound = [phase for phase, each in measured.items() if each.launch_bound]
    calls = {phase: each.calls for phase, each in measured.items()}
    return {"sustained_calls": calls} | ({"launch_bound": launch_bound} if launch_bound else {})


def _repeat(chunk: Callable[[int], _Chunk], count: int, seconds: float) -> list[_Chunk]:
    end = time.monotonic() + seconds
    samples = [chunk(count)]
    while time.monotonic() < end:
        samples.append(chunk(count))
    return samples


def _chunk(fn: Thunk, device: torch.device, before: Thunk | None) -> Callable[[int], _Chunk]:
    """Return a function that makes a number of calls and returns the time of each, in ms.

    It also returns the share of the time until the host had issued all calls. 0 on a CPU.
    """

    def on_cpu(count: int) -> _Chunk:
        times = []
        for _ in range(count):
            if before is not None:
                before()
            times.append(clock_ms(fn, device))
        return times, 0.0

    def on_gpu(count: int) -> _Chunk:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * count)]
        started = time.perf_counter()
        for start, end in zip(events[::2], events[1::2], strict=True):
            if before is not None:
                before()
            start.record()
            fn()
            end.record()
        issued = time.perf_counter()
        events[-1].synchronize()
        share = (issued - started) / (time.perf_counter() - started)
        return [start.elapsed_time(end) for start, end in list(pairwise(events))[::2]], share

    return on_gpu if device.type == "cuda" else on_cpu
