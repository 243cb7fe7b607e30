"""Samples the state of the GPUs while a run is measured: clocks, power, temperature, throttling.

A thread of the worker asks NVML, so that the process of the run is not disturbed. The run notes
when it measures which phase (`systems.measure.windows`), on the same monotonic clock.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from jobs.provenance import GpuReading, read_gpus
from jobs.results.record import Measurements
from jobs.worker.isolation import blocked_signals

INTERVAL_S = 0.04  # NVML updates power and clocks about every 20 to 100 ms
# NVML's energy counter changes about every 0.1 s. Over a shorter time, the difference of two
# readings may be 0.
MIN_ENERGY_S = 1.0
MAX_SAMPLES = 200_000  # about 2 hours; later samples are dropped
Windows = Mapping[str, Iterable[tuple[float, float]]]  # start and end of windows, by phase
Sample = tuple[float, list[GpuReading]]  # time on the monotonic clock in seconds, and all GPUs


class ConditionSampler:
    """Samples the state of some GPUs in the `with` block. Without GPUs or NVML, it does nothing."""

    def __init__(self, gpus: list[str]):
        self._gpus = gpus
        self._samples: list[Sample] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> ConditionSampler:
        if self._gpus and read_gpus(self._gpus):
            self._thread = threading.Thread(target=self._sample, daemon=True)
            # The thread inherits the signal mask. A signal that it received would run the handler
            # in the main thread, even while that blocks signals.
            with blocked_signals():
                self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(INTERVAL_S) and len(self._samples) < MAX_SAMPLES:
            self._samples.append((time.monotonic(), read_gpus(self._gpus)))

    def by_phase(self, windows: Windows) -> dict[str, dict[str, Any]]:
        """Return the conditions of each phase that has a sample. A short window has the nearest."""
        found = {}
        for phase, each in windows.items():
            spans = list(each)
            inside = [s for s in self._samples if any(a <= s[0] <= b for a, b in spans)]
            if inside := inside or self._nearest(spans):
                found[phase] = summary(inside, spans)
        return found

    def _nearest(self, spans: list[tuple[float, float]]) -> list[Sample]:
        def distance(sample: Sample) -> float:
            return min(max(a - sample[0], sample[0] - b) for a, b in spans)

        near = min(self._samples, key=distance, default=None)
        return [near] if near is not None and distance(near) <= 2 * INTERVAL_S else []


def summary(samples: list[Sample], spans: list[tuple[float, float]]) -> dict[str, Any]:
    """Summarize the samples of one phase, which has some windows, over all GPUs.

    Returns:
        samples: number of samples.
        sm_clock_mhz, power_w, temperature_c: minimum, median and maximum over samples and GPUs.
            Left out if NVML does not report them.
        throttle: share of the samples in which a reason slowed down a GPU, by reason.
        energy_j: energy of all GPUs in the windows, from NVML's energy counter. Left out if it is
            unknown.
    """
    readings = [reading for _, gpus in samples for reading in gpus]
    found: dict[str, Any] = {"samples": len(samples)}
    for name in ("sm_clock_mhz", "power_w", "temperature_c"):
        values = [value for r in readings if (value := getattr(r, name)) is not None]
        if values:
            found[name] = [min(values), statistics.median(values), max(values)]
    reasons = Counter(r for _, gpus in samples for r in {r for gpu in gpus for r in gpu.throttle})
    found["throttle"] = {name: round(n / len(samples), 4) for name, n in sorted(reasons.items())}
    energy = _energy_j(samples, spans)
    return found if energy is None else found | {"energy_j": energy}


def energy_facts(
    measurements: Measurements, conditions: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, float]]:
    """Return the energy of a call in each phase in which functions were called back to back.

    The fact sustained_calls of the benchmark is the number of calls by phase. The conditions are
    those of `summary` by phase. The facts joules_per_call, of all GPUs of this node, and
    tflop_per_joule have values by phase. They are left out if no energy is known.
    """
    calls = measurements.facts.get("sustained_calls")
    joules = {
        phase: conditions[phase]["energy_j"] / count
        for phase, count in (calls.items() if isinstance(calls, dict) else ())
        if isinstance(count, int) and count > 0 and conditions.get(phase, {}).get("energy_j")
    }
    work = {
        phase: measurements.flops[phase] / 1e12 / energy
        for phase, energy in joules.items()
        if phase in measurements.flops
    }
    found = {"joules_per_call": joules, "tflop_per_joule": work}
    return {name: values for name, values in found.items() if values}


def _energy_j(samples: list[Sample], spans: list[tuple[float, float]]) -> float | None:
    """Return the energy of all GPUs in the windows, in joules. None if it is unknown."""
    (first, before), (last, after) = samples[0], samples[-1]
    pairs = [(a.energy_j, b.energy_j) for a, b in zip(before, after, strict=False)]
    if len(spans) != 1 or last - first < MIN_ENERGY_S or not pairs:
        return None  # the counter also counts between the windows
    used = [b - a for a, b in pairs if a is not None and b is not None]
    if len(used) < len(pairs):
        return None
    start, end = spans[0]
    return round(sum(used) / (last - first) * (end - start), 3)
