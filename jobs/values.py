"""What a table shows of a record: facts, and the divisions of facts, alike for every benchmark."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from jobs.record import Measurements, Record
from jobs.schema import FACT, Plot, Table
from systems import accounting

_UNITS = {
    "s": 1e-3, "ms": 1.0, "us": 1e3,  # of a millisecond
    "MB": 1e-6, "GB": 1e-9, "MiB": 2**-20, "GiB": 2**-30,  # of a byte
}  # fmt: skip


@dataclass(frozen=True)
class Kind:
    """A value: the unit it is shown in, and which direction is better."""

    unit: str
    direction: str
    label: str


KINDS = {
    "time": Kind("ms", "lower", "time"),
    "tflops": Kind("TFLOP/s", "higher", "TFLOP/s"),
    "bandwidth": Kind("GB/s", "higher", "bandwidth"),
    "bus_bandwidth": Kind("GB/s", "higher", "bus bandwidth"),
    "mfu": Kind("%", "higher", "share of the datasheet's peak"),
    "peak_memory": Kind("GiB", "lower", "peak memory"),
}


def kind_of(view: Table | Plot) -> Kind:
    """The unit and direction of a table's or plot's value, as the view or the value has it."""
    known = KINDS.get(view.value, Kind("", "higher", view.value.removeprefix(FACT)))
    return Kind(view.unit or known.unit, view.direction or known.direction, known.label)


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


def phases(measurements: Measurements, value: str) -> list[str]:
    """The phases for which a value can be shown."""
    m = measurements
    have: dict[str, Any] = {
        "peak_memory": m.peak_memory_bytes,
        "tflops": m.flops,
        "mfu": m.flops,
        "bandwidth": m.bytes,
        "bus_bandwidth": m.bus_bytes,
    }
    if value.startswith(FACT):
        return [""]
    return [
        phase
        for phase in have.get(value, m.samples_ms)
        if value == "peak_memory" or phase in m.samples_ms
    ]


def samples_of(record: Record, view: Table | Plot, phase: str) -> np.ndarray | str | None:
    """A record's value for a view, one number a sample; text for a fact that is none; None where
    there is no such value."""
    m, value = record.measurements, view.value
    if m is None:
        return None
    if value.startswith(FACT):
        return _fact(m.facts, value.split(".")[1:], view.unit)
    if phase not in phases(m, value):
        return None
    if value == "peak_memory":
        peak = m.peak_memory_bytes[phase]
        return np.array([float(np.max(peak)) * _UNITS[kind_of(view).unit]])
    ms = slowest(m, phase)
    if value != "time" and not ms.all():
        return None  # too short for the clock: no rate
    if value == "time":
        return ms * _UNITS[kind_of(view).unit]
    if value in ("bandwidth", "bus_bandwidth"):
        moved = m.bytes[phase] if value == "bandwidth" else m.bus_bytes[phase]
        return moved / ms / 1e6
    if value == "tflops":
        return m.flops[phase] / ms / 1e9
    peak_flops = accounting.peak_flops(record.device, str(record.params.get("dtype")))
    return None if peak_flops is None else m.flops[phase] / (ms * 1e-3) / peak_flops * 100


def _fact(facts: Any, path: list[str], unit: str | None) -> np.ndarray | str | None:
    """A fact that is a number or text. Its name says what it was measured in."""
    fact: Any = facts
    for part in path:
        fact = fact.get(part) if isinstance(fact, dict) else None
    if isinstance(fact, str):
        return fact
    if not isinstance(fact, (bool, int, float)):
        return None
    milliseconds = 1e3 if unit and path[-1].endswith("_seconds") else 1.0
    return np.array([float(fact) * milliseconds * _UNITS.get(unit or "", 1.0)])


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


def shown(number: float) -> str:
    """A number with four significant digits, without an exponent down to a millionth."""
    if number == 0 or not math.isfinite(number):
        return f"{number:g}"
    if abs(number) < 1e-6:
        return f"{number:.3e}"
    exponent = int(f"{number:.3e}".split("e")[1])  # as rounded: 9.9996 is 10.00
    return f"{number:.{max(0, 3 - exponent)}f}"


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
