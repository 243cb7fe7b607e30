"""What a table shows of a record: facts, and the divisions of facts, alike for every benchmark."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jobs.record import Measurements, Record
from jobs.sweep.schema import FACT, NAMED, PREDICTED, SUFFIXES, Plot, Table, measured_in, units_of
from systems.accounting.dtypes import MATMUL_DTYPE
from systems.accounting.hardware import peak_flops

_UNITS = {
    "s": 1e-3, "ms": 1.0, "us": 1e3,  # of a millisecond
    "MB": 1e-6, "GB": 1e-9, "MiB": 2**-20, "GiB": 2**-30,  # of a byte
    "bytes": 1.0, "": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class Value:
    """A value as a view shows it: in which unit, and which direction is better."""

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
        """Whether it has a number for each timed sample, not one a run."""
        return self.name != "peak_memory" and self.has_phases

    @property
    def has_phases(self) -> bool:
        return not self.name.startswith(NAMED) and self.name != "compiling_seconds"


KINDS = {
    value.name: value
    for value in (
        Value("time", "time", "ms", "lower"),
        Value("tflops", "TFLOP/s", "TFLOP/s", "higher"),
        Value("bandwidth", "bandwidth", "GB/s", "higher"),
        Value("bus_bandwidth", "bus bandwidth", "GB/s", "higher"),
        Value("mfu", "MFU", "%", "higher"),  # share of the datasheet's peak
        Value("tokens_per_second", "tokens/s", "tokens/s", "higher"),
        Value("peak_memory", "peak memory", "GiB", "lower"),
        Value("compiling_seconds", "compiling", "s", "lower"),
    )
}


def values_of(view: Table | Plot) -> list[Value]:
    """The values of a table or plot, in the unit and direction that the view or the value has."""
    names = [view.value] if isinstance(view.value, str) else view.value
    return [value_named(name, view.unit, view.direction) for name in names]


def value_named(name: str, unit: str | None = None, direction: str | None = None) -> Value:
    """A value in this unit, where it fits, and else in its own."""
    known = KINDS.get(name) or fact_value(name)
    fits = unit if unit in units_of(name) else None
    return replace(known, unit=fits or known.unit, direction=direction or known.direction)


def fact_value(name: str) -> Value:
    """A fact or a prediction, labelled without what its unit says: `weights` of
    fact.weights_bytes. Of time and memory less is better."""
    predicted = name.startswith(PREDICTED)
    parts = name.removeprefix(PREDICTED if predicted else FACT).split(".")
    unit = measured_in(name)
    suffix = next((suffix for suffix, of in SUFFIXES.items() if of == unit), "")
    words = " ".join(part.removesuffix(suffix) for part in parts).replace("_", " ")
    label = f"predicted {words}" if predicted else words
    return Value(name, label, unit, "lower" if unit else "higher")


def slowest(measurements: Measurements, phase: str) -> np.ndarray:
    """Milliseconds of each sample; of several ranks the slowest, sample by sample."""
    ranks = by_rank(measurements, phase)
    if len(ranks) == 1:
        return ranks[0]
    shortest = min(len(rank) for rank in ranks)
    result: np.ndarray = np.max([rank[:shortest] for rank in ranks], axis=0)
    return result


def by_rank(measurements: Measurements, phase: str) -> list[np.ndarray]:
    """Milliseconds of each sample, one array a rank."""
    samples = measurements.samples_ms[phase]
    ranks = [samples] if isinstance(samples[0], float) else samples
    return [np.asarray(rank, dtype=float) for rank in ranks]


def measured_phases(measurements: Measurements) -> list[str]:
    """The phases of which anything was measured."""
    return list(dict.fromkeys([*measurements.samples_ms, *measurements.peak_memory_bytes]))


def phases(measurements: Measurements, value: str) -> list[str]:
    """The phases for which a value can be shown."""
    m = measurements
    have: dict[str, Any] = {
        "peak_memory": m.peak_memory_bytes,
        "tflops": m.flops,
        "mfu": m.flops,
        "bandwidth": m.bytes,
        "bus_bandwidth": m.bus_bytes,
        "tokens_per_second": m.tokens,
    }
    return [
        phase
        for phase in have.get(value, m.samples_ms)
        if value == "peak_memory" or phase in m.samples_ms
    ]


def samples_of(record: Record, value: Value, phase: str) -> np.ndarray | str | None:
    """A record's value, one number a sample; text for a fact that is none; None where there is no
    such value."""
    m, name = record.measurements, value.name
    if m is None:
        return None
    if name.startswith(FACT):
        return number_of(m.facts, value)
    if name == "compiling_seconds":
        return None if m.compiling_seconds is None else np.array([m.compiling_seconds])
    if phase not in phases(m, name):
        return None
    if name == "peak_memory":
        peak = m.peak_memory_bytes[phase]
        return np.array([float(np.max(peak)) * _UNITS[value.unit]])
    ms = slowest(m, phase)
    if name == "time":
        return ms * _UNITS[value.unit]
    if not ms.all():
        return None  # too short for the clock: no rate
    return _rate(record, m, name, ms, phase)


def _rate(
    record: Record, m: Measurements, name: str, ms: np.ndarray, phase: str
) -> np.ndarray | None:
    """What was done, by the time it took."""
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


def fact_of(facts: Any, path: list[str]) -> Any:
    """What stands at a path of nested facts, or None."""
    for part in path:
        facts = facts.get(part) if isinstance(facts, dict) else None
    return facts


def number_of(facts: Any, value: Value) -> np.ndarray | str | None:
    """A fact, or a prediction, of this name: one number in the value's unit, or text; None where
    there is none. Its name says what it was measured in."""
    fact = fact_of(facts, value.name.split(".")[1:])
    if isinstance(fact, str):
        return fact
    if not isinstance(fact, (bool, int, float)):
        return None
    return np.array([convert(float(fact), measured_in(value.name), value.unit)])


def convert(number: float, unit: str, to: str) -> float:
    """A time or a size in another unit."""
    return number if unit == to else number / _UNITS[unit] * _UNITS[to]


_QUANTILES = {"p10": 0.1, "median": 0.5, "p90": 0.9}


def statistic(samples: np.ndarray, name: str) -> float:
    """One number for many samples."""
    if name == "std":
        return float(np.std(samples, ddof=1)) if len(samples) > 1 else 0.0
    if name in _QUANTILES:
        return _quantile(np.sort(samples), _QUANTILES[name])
    name = {"mean_std": "mean"}.get(name, name)
    return float(getattr(np, name)(samples))


def spread(samples: np.ndarray) -> float:
    """The interquartile range as a share of the median."""
    ordered = np.sort(samples)
    low, middle, high = (_quantile(ordered, q) for q in (0.25, 0.5, 0.75))
    return (high - low) / middle if middle else 0.0


def _quantile(ordered: np.ndarray, q: float) -> float:
    """Linear between neighbours, as numpy's; without numpy's 50 us a call, of which 100,000
    records make a hundred thousand."""
    place = q * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return float(ordered[below] + (place - below) * (ordered[above] - ordered[below]))


def shown_failure(record: Record | None, state: str) -> str:
    """A cell for a run without a measurement: `OOM (41.2 GiB)`, `timeout`, `missing`."""
    if state != "oom":
        return state
    failure = record.failure if record is not None else None
    if failure is None or failure.memory == "host":
        return "OOM (host)"
    if failure.requested_bytes is None:
        return "OOM"
    # What would have been allocated had the last request been met: at least this much is needed.
    needed = failure.requested_bytes + (failure.allocated_bytes or 0)
    return f"OOM ({needed / 2**30:.1f} GiB)"
