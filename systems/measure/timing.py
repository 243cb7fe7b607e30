"""Time one callable: warm up, flush the L2 cache, keep every sample.

On a GPU, CUDA events measure the time while the host is ahead: the GPU is held back before each
sample until all of its kernels have been launched, so launch overhead on the host, which varies
with machine and load, is not included; `host_ms` measures it. On a CPU, `time.perf_counter` does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

MIN_SAMPLES, MAX_SAMPLES = 10, 100
MAX_WARMUP = 1000
HOLD = 3.0  # how long the GPU is held back, in multiples of the host's launch time
MAX_HOLD_MS = 50.0
CYCLES_PER_MS = 2_000_000  # at 2 GHz; a GPU with a slower clock is held back longer
Thunk = Callable[[], object]


def time_ms(
    fn: Thunk,
    device: torch.device,
    *,
    before: Thunk | None = None,
    warmup_ms: float = 25.0,
    measure_ms: float = 100.0,
) -> list[float]:
    """Time calls of `fn`; return milliseconds of each.

    Args:
        fn: the function to time.
        device: the device that it runs on.
        before: called before each sample, untimed (to clear gradients, say).
        warmup_ms: time to spend on warm-up calls; at least two are made.
        measure_ms: time to spend on samples; at least 10 and at most 100 are taken.
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
    """Take samples until they add up to the budget; a busy machine would break an estimate."""
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
    """Return milliseconds until a call of `fn` returns, the median of `calls` after two warm-up
    calls: on an idle GPU, the launch overhead on the host."""
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
    """Return the latency of a synchronised call of `fn` in milliseconds, the median of `calls`
    after ten warm-up calls."""
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
    """Time one call by Python's clock, until the GPU has finished; the GPU must be idle before."""
    start = time.perf_counter()
    fn()
    synchronize(device)
    return round((time.perf_counter() - start) * 1e3, 6)


def synchronize(device: torch.device) -> None:
    """Wait for the GPU; does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cuda_sampler(
    fn: Thunk, before: Thunk | None, device: torch.device, launch_ms: float
) -> Callable[[int], list[float]]:
    cycles = int(min(HOLD * launch_ms, MAX_HOLD_MS) * CYCLES_PER_MS)
    # Writing four times the size of the L2 evicts what the last sample left there.
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
