"""Computes metrics from records: times, rates, memory and facts, alike for every benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jobs.results.record import Measurements, Record
from jobs.sweep.schema import FACT, NAMED, PREDICTED, SUFFIXES, Plot, Table, measured_in, units_of
from systems.accounting.dtypes import MATMUL_DTYPE
from systems.accounting.hardware import peak_flops

_UNITS = {
    "s": 1e-3, "ms": 1.0, "us": 1e3,  # of a millisecond
    "MB": 1e-6, "GB": 1e-9, "MiB": 2**-20, "GiB": 2**-30,  # of a byte
    "bytes": 1.0, "": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class Metric:
    """A `value` of a table or plot: its unit, and which direction is better."""

    name: str  # as the sweep file has it
    label: str
    unit: str
    direction: str

    @property
    def header(self) -> str:
        """`peak memory (GiB)`; the unit is left out where the label says it."""
        return f"{self.label} ({self.unit})" if self.unit not in ("", self.label) else self.label

    @property
    def is_sampled(self) -> bool:
        """True where it has a number for each timed sample, False where it has one a run."""
        return self.name != "peak_memory" and self.has_phases

    @property
    def has_phases(self) -> bool:
        return not self.name.startswith(NAMED) and self.name != "compiling_seconds"


METRICS = {
    metric.name: metric
    for metric in (
        Metric("time", "time", "ms", "lower"),
        Metric("tflops", "TFLOP/s", "TFLOP/s", "higher"),
        Metric("bandwidth", "bandwidth", "GB/s", "higher"),
        Metric("bus_bandwidth", "bus bandwidth", "GB/s", "higher"),
        Metric("mfu", "MFU", "%", "higher"),  # share of the datasheet's peak
        Metric("tokens_per_second", "tokens/s", "tokens/s", "higher"),
        Metric("peak_memory", "peak memory", "GiB", "lower"),
        Metric("compiling_seconds", "compiling", "s", "lower"),
    )
}


def metrics_of(view: Table | Plot) -> list[Metric]:
    """The metrics of a view, each in the view's unit and direction, or else in its own."""
    names = [view.value] if isinstance(view.value, str) else view.value
    return [metric_named(name, view.unit, view.direction) for name in names]


def metric_named(name: str, unit: str | None = None, direction: str | None = None) -> Metric:
    """The metric of this name, in this unit if it fits, else in its own."""
    known = METRICS.get(name) or fact_metric(name)
    fits = unit if unit in units_of(name) else None
    return replace(known, unit=fits or known.unit, direction=direction or known.direction)


def fact_metric(name: str) -> Metric:
    """The metric of a fact or a prediction, labelled without what its unit says: `weights` for
    fact.weights_bytes. Less time and less memory are better."""
    predicted = name.startswith(PREDICTED)
    parts = name.removeprefix(PREDICTED if predicted else FACT).split(".")
    unit = measured_in(name)
    suffix = next((suffix for suffix, of in SUFFIXES.items() if of == unit), "")
    words = " ".join(part.removesuffix(suffix) for part in parts).replace("_", " ")
    label = f"predicted {words}" if predicted else words
    return Metric(name, label, unit, "lower" if unit else "higher")


def slowest_rank(measurements: Measurements, phase: str) -> np.ndarray:
    """Milliseconds of each sample; with several ranks the slowest rank's, sample by sample."""
    samples = measurements.samples_ms[phase]
    if isinstance(samples[0], float):
        return np.asarray(samples, dtype=float)
    shortest = min(len(rank) for rank in samples)
    slowest: np.ndarray = np.max([rank[:shortest] for rank in samples], axis=0)
    return slowest


def measured_phases(measurements: Measurements) -> list[str]:
    """The phases of which anything was measured."""
    return list(dict.fromkeys([*measurements.samples_ms, *measurements.peak_memory_bytes]))


def phases_with(measurements: Measurements, metric: str) -> list[str]:
    """The phases for which a metric can be computed."""
    return [phase for phase in _by_phase(measurements, metric) if _has(measurements, metric, phase)]


def _by_phase(m: Measurements, metric: str) -> Mapping[str, Any]:
    """The measurements that a metric needs beside the time, by phase."""
    match metric:
        case "peak_memory":
            return m.peak_memory_bytes
        case "tflops" | "mfu":
            return m.flops
        case "bandwidth":
            return m.bytes
        case "bus_bandwidth":
            return m.bus_bytes
        case "tokens_per_second":
            return m.tokens
        case _:
            return m.samples_ms


def _has(m: Measurements, metric: str, phase: str) -> bool:
    timed = metric == "peak_memory" or phase in m.samples_ms
    return timed and phase in _by_phase(m, metric)


def metric_samples(record: Record, metric: Metric, phase: str) -> np.ndarray | str | None:
    """Compute a metric of a record: a number for each sample; text for a fact that is text; None
    where the record does not have it."""
    m, name = record.measurements, metric.name
    if m is None:
        return None
    if name.startswith(FACT):
        return fact_number(m.facts, metric)
    if name == "compiling_seconds":
        return None if m.compiling_seconds is None else np.array([m.compiling_seconds])
    if not _has(m, name, phase):
        return None
    if name == "peak_memory":
        peak = m.peak_memory_bytes[phase]
        return np.array([float(np.max(peak)) * _UNITS[metric.unit]])
    ms = slowest_rank(m, phase)
    if name == "time":
        # Without a copy: 100,000 records of 100 samples are 80 MB.
        return ms if metric.unit == "ms" else ms * _UNITS[metric.unit]
    if not ms.all():
        return None  # too short for the clock: no rate
    return _rate(record, m, name, ms, phase)


def _rate(
    record: Record, m: Measurements, name: str, ms: np.ndarray, phase: str
) -> np.ndarray | None:
    """Divide what was done by the time it took."""
    if name == "bandwidth":
        return m.bytes[phase] / ms / 1e6
    if name == "bus_bandwidth":
        return m.bus_bytes[phase] / ms / 1e6
    if name == "tokens_per_second":
        return m.tokens[phase] / ms * 1e3
    if name == "tflops":
        return m.flops[phase] / ms / 1e9
    precision = record.params.get("precision")
    dtype = record.params.get("dtype") or MATMUL_DTYPE.get(str(precision))
    peak = peak_flops(record.device, str(dtype))
    return None if peak is None else m.flops[phase] / (ms * 1e-3) / peak * 100


def fact_at(facts: Any, path: list[str]) -> Any:
    """The fact at a path of nested facts, or None."""
    for part in path:
        facts = facts.get(part) if isinstance(facts, dict) else None
    return facts


def fact_number(facts: Any, metric: Metric) -> np.ndarray | str | None:
    """The fact, or prediction, that a metric names: one number in the metric's unit, or text; None
    where there is none. The fact's name says the unit that it was measured in."""
    fact = fact_at(facts, metric.name.split(".")[1:])
    if isinstance(fact, str):
        return fact
    if not isinstance(fact, (bool, int, float)):
        return None
    return np.array([convert(float(fact), measured_in(metric.name), metric.unit)])


def convert(number: float, unit: str, to: str) -> float:
    """Convert a time or a size to another unit."""
    return number if unit == to else number / _UNITS[unit] * _UNITS[to]
