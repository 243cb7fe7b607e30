"""Measure the execution time of functions on a GPU or CPU.

`time_ms` calls a function repeatedly and returns the duration of each call. On a CPU, it uses
time.perf_counter. On a GPU, it uses CUDA events and flushes the L2 cache before each call.

Launch overhead depends on the load of the host. To exclude it, `time_ms` keeps the GPU busy while
the host launches the kernels of a call, for at most 50 ms (MAX_HOLD_MS) per call. `host_ms`
measures the launch overhead.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

MIN_SAMPLES, MAX_SAMPLES = 10, 100  # minimum and maximum number of timed calls
MAX_WARMUP = 1000  # maximum number of warm-up calls
HOLD = 3.0  # time for which the GPU is kept busy before a call, relative to the launch time
MAX_HOLD_MS = 50.0  # maximum time for which the GPU is kept busy before a call, in milliseconds
CYCLES_PER_MS = 2_000_000  # at a clock rate of 2 GHz; a slower GPU is kept busy longer
Thunk = Callable[[], object]


def time_ms(
    fn: Thunk,
    device: torch.device,
    *,
    before: Thunk | None = None,
    warmup_ms: float = 25.0,
    measure_ms: float = 100.0,
) -> list[float]:
    """Call a function repeatedly, and return the duration of each call in milliseconds.

    Args:
        fn: function to time.
        device: device on which `fn` runs.
        before: function that is called before each call of `fn` and not timed, for example to clear
            gradients.
        warmup_ms: total time of the warm-up calls, in milliseconds. At least two calls are made.
        measure_ms: total time of the timed calls, in milliseconds. At least 10 and at most 100
            calls are made.
    """
    if device.type != "cuda":
        _cpu_samples(fn, before, warmup_ms, 2, MAX_WARMUP)
        return _cpu_samples(fn, before, measure_ms, MIN_SAMPLES, MAX_SAMPLES)
    sample = _cuda_sampler(fn, before, device, host_ms(fn, device, before=before))
    estimate = max(min(sample(2)), 1e-3)
    sample(max(1, min(int(warmup_ms / estimate), MAX_WARMUP)))
    samples = sample(max(MIN_SAMPLES, min(int(measure_ms / estimate), MAX_SAMPLES)))
    return [round(ms, 6) for ms in samples]


def _cpu_samples(
    fn: Thunk, before: Thunk | None, budget_ms: float, fewest: int, most: int
) -> list[float]:
    """Call a function repeatedly, and return the time of each call in milliseconds.

    The function is called until the total time reaches a budget, but at least `fewest` and at most
    `most` times.

    Args:
        fn: function to time.
        before: function that is called before each call of `fn` and not timed.
        budget_ms: total time of all calls, in milliseconds.
        fewest: minimum number of calls.
        most: maximum number of calls.
    """
    samples: list[float] = []
    while len(samples) < fewest or (len(samples) < most and sum(samples) < budget_ms):
        if before is not None:
            before()
        start = time.perf_counter()
        fn()
        samples.append(round((time.perf_counter() - start) * 1e3, 6))  # rounded to 1 ns
    return samples


def host_ms(
    fn: Thunk, device: torch.device, *, before: Thunk | None = None, calls: int = 10
) -> float:
    """Return the time that a call of `fn` takes on the host, in milliseconds.

    If `fn` runs on a GPU, this is the launch overhead: the GPU is idle before the call, and the
    host does not wait for the GPU. The result is the median of `calls` calls after two warm-up
    calls. The function `before` is called before each of these calls and is not timed.
    """
    samples = []
    for _ in range(calls + 2):
        if before is not None:
            before()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        fn()
        samples.append((time.perf_counter() - start) * 1e3)
    return round(statistics.median(samples[2:]), 6)


def wall_ms(
    fn: Thunk, device: torch.device, *, before: Thunk | None = None, calls: int = 50
) -> float:
    """Return the time from the start of a call of `fn` to the end of its GPU work, in milliseconds.

    The GPU is idle before the call. The result is the median of `calls` calls after ten warm-up
    calls. The function `before` is called before each of these calls and is not timed.
    """
    samples = []
    for _ in range(calls + 10):
        if before is not None:
            before()
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        fn()
        torch.cuda.synchronize(device)
        samples.append((time.perf_counter() - start) * 1e3)
    return round(statistics.median(samples[10:]), 6)


def clock_ms(fn: Thunk, device: torch.device) -> float:
    """Return the time from the start of one call of `fn` to the end of its GPU work.

    The time is in milliseconds and is measured on the host. The GPU must be idle before the call.
    """
    start = time.perf_counter()
    fn()
    synchronize(device)
    return round((time.perf_counter() - start) * 1e3, 6)


def synchronize(device: torch.device) -> None:
    """Wait until the GPU has finished all work. Do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cuda_sampler(
    fn: Thunk, before: Thunk | None, device: torch.device, launch_ms: float
) -> Callable[[int], list[float]]:
    cycles = int(min(HOLD * launch_ms, MAX_HOLD_MS) * CYCLES_PER_MS)
    # Writing four times the size of the L2 cache evicts the data of the previous call.
    l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    flush = torch.empty(4 * max(l2_bytes, 1 << 24), dtype=torch.int8, device=device)

    def sample(n: int) -> list[float]:
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(n)
        ]
        for start, end in events:
            if before is not None:
                before()
            flush.zero_()
            torch.cuda._sleep(cycles)
            start.record()
            fn()
            end.record()
        torch.cuda.synchronize(device)
        return [start.elapsed_time(end) for start, end in events]

    return sample
