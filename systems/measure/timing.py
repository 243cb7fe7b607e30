"""Measure the execution time of functions on a GPU or CPU.

`time_ms` calls a function repeatedly and returns the duration of each call. On a CPU, it uses
time.perf_counter. On a GPU, it uses CUDA events and flushes the L2 cache before each call.

Launch overhead depends on the load of the host. To exclude it, `time_ms` keeps the GPU busy while
the host launches the kernels of a call. This time is called hold. `host_ms` measures the launch
overhead.

The clock of a GPU depends on the share of time in which it computes, because power and temperature
follow this share with a delay. The warm-up therefore has the same holds as the measurement. A
single process has holds of three times the launch overhead of each function, at least 1 ms. Under a
power cap, another hold gives another clock. All processes in the rounds of a block therefore have
one hold: the longest in the trial of the block.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from systems.benchmark import round_options
from systems.measure.windows import window

MIN_SAMPLES, MAX_SAMPLES = 10, 100  # minimum and maximum number of timed calls
MAX_WARMUP = 1000  # maximum number of warm-up calls
# Minimum duration of the warm-up on a GPU with holds, in milliseconds. Clock and power settle
# within about 0.2 s after a change of the load.
SETTLE_MS = 200.0
HOLD = 3.0  # hold relative to the launch time
LEAST_HOLD = 1.5  # the same for a hold that the round of a block gives; below 1, launches are timed
MIN_HOLD_MS, MAX_HOLD_MS = 1.0, 50.0  # minimum and maximum hold, in milliseconds
CYCLES_PER_MS = 2_000_000  # at a clock rate of 2 GHz; a slower GPU is kept busy longer
Thunk = Callable[[], object]


def time_ms(
    fn: Thunk,
    device: torch.device,
    *,
    before: Thunk | None = None,
    warmup_ms: float = 25.0,
    measure_ms: float = 100.0,
    launch_ms: float | None = None,
    phase: str | None = None,
) -> list[float]:
    """Call a function repeatedly, and return the duration of each call in milliseconds.

    Args:
        before: called before each call of `fn` and not timed, for example to clear gradients.
        warmup_ms: total time of the warm-up calls, at least two. On a GPU, it includes the holds
            and is at least 200 ms.
        measure_ms: total time of the timed calls, which are 10 to 100.
        launch_ms: result of `host_ms` for the same function. None: measure it.
        phase: name under which the window of the timed calls is noted, see `windows`.
    """
    if device.type != "cuda":
        _cpu_samples(fn, before, warmup_ms, 2, MAX_WARMUP)
        with window(phase):
            return _cpu_samples(fn, before, measure_ms, MIN_SAMPLES, MAX_SAMPLES)
    hold = hold_ms(host_ms(fn, device, before=before) if launch_ms is None else launch_ms)
    sample = _cuda_sampler(fn, before, device, hold)
    estimate = max(min(sample(2)), 1e-3)
    sample(max(1, min(int(max(warmup_ms, SETTLE_MS) / (estimate + hold)), MAX_WARMUP)))
    with window(phase):
        # The first call starts from an idle GPU, unlike the others.
        samples = sample(1 + max(MIN_SAMPLES, min(int(measure_ms / estimate), MAX_SAMPLES)))[1:]
    return [round(ms, 6) for ms in samples]


def hold_ms(launch_ms: float) -> float:
    """Return the milliseconds for which the GPU is kept busy before each timed call.

    It is the hold that the round of a block gives, unless that is too short for the launch, see
    `round_options`. launch_ms is the result of `host_ms`.
    """
    given = round_options().hold_ms
    hold = max(given, LEAST_HOLD * launch_ms) if given else max(HOLD * launch_ms, MIN_HOLD_MS)
    return min(hold, MAX_HOLD_MS)


def _cpu_samples(
    fn: Thunk, before: Thunk | None, budget_ms: float, fewest: int, most: int
) -> list[float]:
    """Return milliseconds of calls that take budget_ms, at least `fewest` and at most `most`."""
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
    """Return the milliseconds that a call of `fn` takes on the host: on a GPU the launch overhead.

    The GPU is idle before the call, and the host does not wait for it. The result is the median of
    `calls` calls after two of warm-up. `before` is called before each call and not timed.
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
    """Return the milliseconds from the start of a call of `fn` to the end of its GPU work.

    The GPU is idle before the call. The result is the median of `calls` calls after ten of warm-up.
    `before` is called before each call and not timed.
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
    """Return the milliseconds from the start of one call of `fn` to the end of its GPU work.

    They are measured on the host. The GPU must be idle before the call.
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
    fn: Thunk, before: Thunk | None, device: torch.device, hold: float
) -> Callable[[int], list[float]]:
    cycles = int(hold * CYCLES_PER_MS)
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
