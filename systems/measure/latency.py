"""Measure the latency of functions that are called in turn in one process.

On a shared host, the latency of the same function differs by tens of percent between processes, and
between moments. The ratio of functions that are called in turn is far more stable than their times.
A function with much Python code slows down the one that is called after it, so its ratio to that
one is too low.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from systems.measure.timing import clock_ms, synchronize
from systems.measure.windows import during, window

WARMUP_ROUNDS = 20


def latency_ms_in_turn(
    functions: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    before: Callable[[], object],
    rounds: int,
) -> dict[str, list[float]]:
    """Call each function once per round, and return the latency of each call in milliseconds.

    It is the time from the start of the call until the device is idle again, as it is before the
    call. The order of the functions is reversed after each round. `before` is called before each
    call and not timed. The first `WARMUP_ROUNDS` rounds do not count among `rounds`. Each other
    call is a window of a phase with the name of its function, see `systems.measure.windows`.
    """
    latencies: dict[str, list[float]] = {name: [] for name in functions}
    order = list(functions)
    for number in range(WARMUP_ROUNDS + rounds):
        for name in order:
            before()
            synchronize(device)
            with during(name), window(None if number < WARMUP_ROUNDS else name):
                latencies[name].append(clock_ms(functions[name], device))
        order.reverse()
    return {name: times[WARMUP_ROUNDS:] for name, times in latencies.items()}
