"""Time a function: warm up, call it repeatedly, and return the duration of every call.

On a GPU, CUDA events measure the time. Before each call the L2 cache is flushed, and the GPU is
kept busy until all kernels of the call have been launched (at most MAX_HOLD_MS). So the result does
not include launch overhead on the host, which depends on the machine and its load. `host_ms`
measures that overhead. On a CPU, `time.perf_counter` measures the time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

MIN_SAMPLES, MAX_SAMPLES = 10, 100
MAX_WARMUP = 1000  # maximum number of warm-up calls
HOLD = 3.0  # how long the GPU is kept busy before a sample, as a multiple of the launch time
MAX_HOLD_MS = 50.0  # maximum of that time, in milliseconds
CYCLES_PER_MS = 2_000_000  # at 2 GHz; a GPU with a lower clock rate is kept busy longer
Thunk = Callable[[], object]


def time_ms(
    fn: Thunk,
    device: torch.device,
    *,
    before: Thunk | None = None,
    warmup_ms: float = 25.0,
    measure_ms: float = 100.0,
) -> list[float]:
    """Time calls of `fn`; return the duration of each in milliseconds.

    Args:
        fn: function to time.
        device: device on which it runs.
        before: function that is called before each sample and not timed, for example to clear
            gradients.
        warmup_ms: time for warm-up calls. At least two are made.
        measure_ms: time for samples. At least 10 and at most 100 are taken.
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
    """Take samples until their sum reaches the budget.

    The number of samples is not estimated from a few calls, because on a busy machine the estimate
    would be wrong.

    Args:
        fn: function to time.
        before: function that is called before each sample and not timed.
        budget_ms: time for all samples, in milliseconds.
        fewest, most: limits of the number of samples.
    """
    samples: list[float] = []
    while len(samples) < fewest or (len(samples) < most and sum(samples) < budget_ms):
        if before is not None:
            before()
        start = time.perf_counter()
        fn()
        samples.append(round((time.perf_counter() - start) * 1e3, 6))  # to the nanosecond
    return samples


def host_ms(
    fn: Thunk, device: torch.device, *, before: Thunk | None = None, calls: int = 10
) -> float:
    """Return the milliseconds until a call of `fn` returns on the host, with an idle GPU.

    On a GPU this is the launch overhead. The result is the median of `calls` calls after two
    warm-up calls. `before` is called before each and not timed.
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
    """Return the latency of a synchronized call of `fn` on a GPU, in milliseconds.

    The result is the median of `calls` calls after ten warm-up calls. `before` is called before
    each and not timed.
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
    """Return the milliseconds of one call with Python's clock, until the GPU has finished.

    The GPU must be idle before the call.
    """
    start = time.perf_counter()
    fn()
    synchronize(device)
    return round((time.perf_counter() - start) * 1e3, 6)


def synchronize(device: torch.device) -> None:
    """Wait until the GPU has finished all work; do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cuda_sampler(
    fn: Thunk, before: Thunk | None, device: torch.device, launch_ms: float
) -> Callable[[int], list[float]]:
    cycles = int(min(HOLD * launch_ms, MAX_HOLD_MS) * CYCLES_PER_MS)
    # Writing four times the size of the L2 cache evicts the data of the last sample.
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
