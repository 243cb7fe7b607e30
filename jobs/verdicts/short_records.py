"""Reads results folders with one time and SM clock per process and phase, instead of all samples.

The process is the unit of a comparison. Its time is the median of its samples. A folder with
100,000 records needs less than 1 GB of memory in this form.
"""

from __future__ import annotations

from array import array
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from jobs.errors import CommandError
from jobs.frame.metrics import slowest_rank
from jobs.frame.statistics import statistic
from jobs.results.record import Measurements, Record
from jobs.results.run_states import Observation, observe
from jobs.results.unreadable import UnreadableResults
from jobs.verdicts.conditions import sm_clock_mhz


def read_short(folder: Path) -> Observation:
    """Read a results folder. Its records contain one time per phase, the median.

    Raises:
        CommandError: if the folder cannot be read.
    """
    try:
        return observe(folder, _shorten)
    except (FileNotFoundError, UnreadableResults) as error:
        raise CommandError(str(error)) from None


def median_ms(measurements: Measurements, phase: str) -> float | None:
    """Return the median time of the samples in ms, or None if the phase was not timed.

    If several ranks measured a sample, its time is that of the slowest rank.
    """
    samples = measurements.samples_ms.get(phase)
    if samples is None:
        return None
    if len(samples) == 1 and isinstance(samples[0], float):  # as `read_short` leaves it
        return samples[0]
    return statistic(slowest_rank(measurements, phase), "median")


@cache  # many records share one object
def _conditions(sm_clock_mhz: float | None, reasons: tuple[str, ...]) -> dict[str, Any]:
    """Return the conditions of a phase without what is not compared."""
    return {"sm_clock_mhz": [sm_clock_mhz], "throttle": dict.fromkeys(reasons)}


def _shorten(record: Record) -> None:
    """Replace the samples of each phase by their median, and remove what is not compared."""
    for phase, known in record.conditions.items():
        clock, reasons = sm_clock_mhz(record, phase), tuple(known.get("throttle", ()))
        record.conditions[phase] = _conditions(clock, reasons)
    record.params.clear()  # as in the manifest
    if record.measurements is None:
        return
    facts = record.measurements.facts
    for name in facts.keys() - {"joules_per_call", "launch_bound"}:
        del facts[name]
    samples_ms: dict[str, Any] = record.measurements.samples_ms
    for phase, samples in samples_ms.items():
        if isinstance(samples, array):  # in place, which takes a third of the time
            np.frombuffer(samples).sort()
            low, high = samples[(len(samples) - 1) // 2], samples[len(samples) // 2]
            samples_ms[phase] = array("d", [low + 0.5 * (high - low)])
        else:
            samples_ms[phase] = array("d", [median_ms(record.measurements, phase)])
