"""Computes the metrics that tables and plots show, from the records of runs.

A metric is a time, a rate such as TFLOP/s, the peak memory, or a fact. A fact is any other named
value that a benchmark returns, such as fact.weights_bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jobs.frame.statistics import statistic
from jobs.results.record import Measurements, Record
from jobs.sweep.views import (
    FACT,
    NAMED,
    PREDICTED,
    SUFFIXES,
    TIME_UNITS,
    Plot,
    Table,
    measured_in,
    units_of,
)
from systems.accounting.dtypes import MATMUL_DTYPE
from systems.accounting.hardware import peak_flops

_UNITS = {
    "s": 1e-3, "ms": 1.0, "us": 1e3,  # per millisecond
    "MB": 1e-6, "GB": 1e-9, "MiB": 2**-20, "GiB": 2**-30,  # per byte
    "bytes": 1.0, "": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class Metric:
    """Metric that a table or plot shows, with its unit and whether lower or higher is better."""

    name: str  # as in the sweep file, such as peak_memory
    label: str  # text for column headers
    unit: str
    direction: str  # the better direction, "lower" or "higher"
    # Field of the measurements with what the metric needs by phase. A rate also needs the times.
    # "": the metric has one value per run.
    needs: str = ""

    @property
    def header(self) -> str:
        """Label and unit for a column header, such as `peak memory (GiB)`.

        The unit is omitted if it equals the label.
        """
        return f"{self.label} ({self.unit})" if self.unit not in ("", self.label) else self.label

    def heading(self, title: str) -> str:
        """Return the title of a table or plot, with the metric and its unit added.

        For example, `forward` becomes `forward: peak memory (GiB)`. To a title that names the
        metric, and for a fact or a prediction, only the unit is added, unless the title names it.
        """
        if not _contains(title, self.label) and not self.name.startswith(NAMED):
            return f"{title}: {self.header}"
        if self.unit == "" or _contains(title, self.unit):
            return title
        return f"{title} ({self.unit})"

    @property
    def is_sampled(self) -> bool:
        """Whether the metric has one value per timed sample. This is true for times and rates."""
        return self.has_phases and self.name != "peak_memory"

    @property
    def is_timed(self) -> bool:
        """Whether the metric was measured with a clock, so that it differs between processes."""
        in_time = self.unit in TIME_UNITS and not self.name.startswith(PREDICTED)
        return self.is_sampled or in_time

    @property
    def has_phases(self) -> bool:
        """Whether the metric has values for each phase. If False, it has one value per run."""
        return self.needs != ""


def _contains(title: str, words: str) -> bool:
    """Return True if a title contains the words, not as a part of longer words."""
    return re.search(rf"(?<![\w'/]){re.escape(words)}(?![\w/])", title, re.I) is not None


METRICS = {
    metric.name: metric
    for metric in (
        Metric("time", "time", "ms", "lower", "samples_ms"),
        Metric("tflops", "TFLOP/s", "TFLOP/s", "higher", "flops"),
        Metric("bandwidth", "bandwidth", "GB/s", "higher", "bytes"),
        Metric("bus_bandwidth", "bus bandwidth", "GB/s", "higher", "bus_bytes"),
        Metric("mfu", "MFU", "%", "higher", "flops"),  # percent of the datasheet's peak FLOP/s
        Metric("tokens_per_second", "tokens/s", "tokens/s", "higher", "tokens"),
        Metric("peak_memory", "peak memory", "GiB", "lower", "peak_memory_bytes"),
        Metric("compiling_seconds", "compilation", "s", "lower"),
    )
}


def metrics_of(view: Table | Plot) -> list[Metric]:
    """Return the metrics that a table or plot shows, with its unit and its better direction."""
    return [metric_named(name, view.unit, view.direction) for name in view.values]


def metric_named(name: str, unit: str | None = None, direction: str | None = None) -> Metric:
    """Return the metric with a name of METRICS, or that of a fact or prediction.

    The default unit replaces one that does not fit.
    """
    known = METRICS.get(name) or fact_metric(name)
    fits = unit if unit in units_of(name) else None
    return replace(known, unit=fits or known.unit, direction=direction or known.direction)


def fact_metric(name: str) -> Metric:
    """Return the metric of a fact or prediction, such as `fact.weights_bytes`.

    The suffix of its name gives the unit and is not part of the label. Without a unit, higher
    values are better.
    """
    predicted = name.startswith(PREDICTED)
    parts = name.removeprefix(PREDICTED if predicted else FACT).split(".")
    unit = measured_in(name)
    suffix = next((suffix for suffix, of in SUFFIXES.items() if of == unit), "")
    words = " ".join(part.removesuffix(suffix) for part in parts).replace("_", " ")
    label = f"predicted {words}" if predicted else words
    return Metric(name, label, unit, "lower" if unit else "higher")


def slowest_rank(measurements: Measurements, phase: str) -> np.ndarray:
    """Return the times of all samples of one phase in milliseconds, as an array `(samples,)`.

    If several ranks measured a sample, its time is that of the slowest rank. The last samples of a
    rank that has more than another are not used.
    """
    samples = measurements.samples_ms[phase]
    if isinstance(samples[0], float):
        return np.asarray(samples, dtype=float)
    shortest = min(len(rank) for rank in samples)
    slowest: np.ndarray = np.max([rank[:shortest] for rank in samples], axis=0)
    return slowest


def median_ms(measurements: Measurements, phase: str) -> float | None:
    """Return the median time of the samples in ms, or None if the phase was not timed."""
    if phase not in measurements.samples_ms:
        return None
    return statistic(slowest_rank(measurements, phase), "median")


def measured_phases(measurements: Measurements) -> list[str]:
    """Return the phases for which times or peak memory were measured."""
    return list(dict.fromkeys([*measurements.samples_ms, *measurements.peak_memory_bytes]))


def phases_with(measurements: Measurements, metric: Metric) -> list[str]:
    """Return the phases, such as forward, for which a metric can be computed from measurements."""
    found = getattr(measurements, metric.needs) if metric.has_phases else ()
    return [each for each in found if not metric.is_sampled or each in measurements.samples_ms]


def metric_samples(record: Record, metric: Metric, phase: str) -> np.ndarray | str | None:
    """Compute a metric of one phase from the record of a run.

    It is an array `(samples,)` in the unit of the metric, or `(1,)` if the metric has one value per
    phase or run; a string if the value is text; None if the record does not contain the metric, or
    a time of a rate is 0. Metrics without phases ignore the phase.
    """
    m, name = record.measurements, metric.name
    if m is None:
        return None
    if name.startswith(FACT):
        return fact_number(m.facts, metric)
    if name == "compiling_seconds":
        return None if m.compiling_seconds is None else np.array([m.compiling_seconds])
    if phase not in phases_with(m, metric):
        return None
    if name == "peak_memory":
        peak = m.peak_memory_bytes[phase]
        return np.array([float(np.max(peak)) * _UNITS[metric.unit]])
    ms = slowest_rank(m, phase)
    if name == "time":
        # Do not copy in the usual case. 100,000 records with 100 samples take 80 MB.
        return ms if metric.unit == "ms" else ms * _UNITS[metric.unit]
    if not ms.all():
        return None  # the time was too short for the clock
    return _rate(record, name, getattr(m, metric.needs)[phase], ms)


def _rate(record: Record, name: str, work: float, ms: np.ndarray) -> np.ndarray | None:
    """Return the rate of each sample, which is the work of the sample divided by its time.

    All times in `ms` must be greater than 0. Return None for mfu (model FLOPs utilization) if the
    peak FLOP/s of the device is unknown.
    """
    if name in ("bandwidth", "bus_bandwidth"):
        return work / ms / 1e6
    if name == "tokens_per_second":
        return work / ms * 1e3
    if name == "tflops":
        return work / ms / 1e9
    precision = record.params.get("precision")
    dtype = record.params.get("dtype") or MATMUL_DTYPE.get(str(precision))
    peak = peak_flops(record.device, str(dtype))
    return None if peak is None else work / (ms * 1e-3) / peak * 100


def fact_at(facts: Any, path: list[str]) -> Any:
    """Return the value at a path of keys in nested dicts, or None if a key does not exist."""
    for part in path:
        facts = facts.get(part) if isinstance(facts, dict) else None
    return facts


def scalars(facts: dict[str, Any], *above: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the keys that lead to each scalar in nested dicts, and the scalar."""
    for key, value in facts.items():
        if isinstance(value, dict):
            yield from scalars(value, *above, key)
        elif value is not None and not isinstance(value, list):
            yield (*above, key), value


def fact_number(facts: Any, metric: Metric) -> np.ndarray | str | None:
    """Return the value of a metric that a benchmark returned (fact) or predicted (prediction).

    It is an array with one number in the unit of the metric, or a string if the value is text. None
    if the value does not exist, or is neither a number nor text.
    """
    fact = fact_at(facts, metric.name.split(".")[1:])
    if isinstance(fact, str):
        return fact
    if not isinstance(fact, (bool, int, float)):
        return None
    return np.array([convert(float(fact), measured_in(metric.name), metric.unit)])


def convert(number: float, unit: str, to: str) -> float:
    """Convert a time or a size from the unit `unit` to the unit `to`."""
    return number if unit == to else number / _UNITS[unit] * _UNITS[to]
