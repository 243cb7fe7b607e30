"""Two results folders, run by run: faster, slower, same or unsure, knowing the noise.

The interval of the ratio of medians comes from the bootstrap (Efron 1979): samples are drawn again
from the samples, whole repeats first where there are several, because samples of one process share
its clock, its memory and its luck.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jobs.expand import Run
from jobs.record import Record
from jobs.status import Observation
from jobs.tables import Entry, entries
from jobs.values import slowest

RESAMPLES = 2000
CONFIDENCE = 95.0
REGRESSIONS = ("slower", "broken")


@dataclass(frozen=True)
class Comparison:
    """One phase of one run, before and after. Times in ms; ratio = after / before."""

    run: Run
    device: str
    phase: str
    before: float | None
    after: float | None
    low: float | None
    high: float | None
    verdict: str  # faster, slower, same, unsure; broken, fixed, new, gone, not measured

    @property
    def ratio(self) -> float | None:
        if self.before is None or self.after is None:
            return None
        return self.after / self.before


def bootstrap_ratio(
    before: list[np.ndarray], after: list[np.ndarray], rng: np.random.Generator
) -> tuple[float, float]:
    """The interval of median(after) / median(before). Each argument: samples, one array a repeat."""
    ratios = _medians(after, rng) / _medians(before, rng)
    edge = (100 - CONFIDENCE) / 2
    low, high = np.percentile(ratios, [edge, 100 - edge])
    return float(low), float(high)


def _medians(repeats: list[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    if len(repeats) == 1:
        one = repeats[0]
        return np.median(one[rng.integers(0, len(one), (RESAMPLES, len(one)))], axis=1)
    result = np.empty(RESAMPLES)
    for i in range(RESAMPLES):
        chosen = [repeats[k] for k in rng.integers(0, len(repeats), len(repeats))]
        result[i] = np.median(np.concatenate([s[rng.integers(0, len(s), len(s))] for s in chosen]))
    return result


def verdict(low: float, high: float, tolerance: float) -> str:
    """What the interval [low, high] of after/before says.

    faster or slower: the whole interval lies beyond the tolerance; same: the whole interval lies
    within it; unsure: neither.
    """
    if high < 1 - tolerance:
        return "faster"
    if low > 1 + tolerance:
        return "slower"
    if low >= 1 - tolerance and high <= 1 + tolerance:
        return "same"
    return "unsure"


def compare(before: Observation, after: Observation, tolerance: float) -> list[Comparison]:
    """Every phase of every run of either folder, on each kind of device.

    Args:
        before, after: the two folders.
        tolerance: a relative difference that does not matter.
    """
    old, new = _grouped(before), _grouped(after)
    rng = np.random.default_rng(0)
    result: list[Comparison] = []
    for key in {**old, **new}:
        a, b = old.get(key, []), new.get(key, [])
        run = (a or b)[0].run
        a_ok, b_ok = _ok(a), _ok(b)
        if not a_ok or not b_ok:
            result.append(
                Comparison(run, key[1], "", None, None, None, None, _without(a, b, a_ok, b_ok))
            )
            continue
        assert a_ok[0].measurements is not None and b_ok[0].measurements is not None
        for phase in a_ok[0].measurements.samples_ms:
            if phase not in b_ok[0].measurements.samples_ms:
                continue
            times = [
                [slowest(r.measurements, phase) for r in side if r.measurements]
                for side in (a_ok, b_ok)
            ]
            medians = [float(np.median(np.concatenate(side))) for side in times]
            low, high = bootstrap_ratio(times[0], times[1], rng)
            says = verdict(low, high, tolerance)
            result.append(Comparison(run, key[1], phase, medians[0], medians[1], low, high, says))
    return result


def _grouped(observation: Observation) -> dict[tuple[str, str], list[Entry]]:
    groups: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries(observation):
        groups.setdefault((entry.run.id, entry.device), []).append(entry)
    return groups


def _ok(side: list[Entry]) -> list[Record]:
    return [entry.record for entry in side if entry.state == "ok" and entry.record is not None]


def _without(a: list[Entry], b: list[Entry], a_ok: list[Record], b_ok: list[Record]) -> str:
    """The verdict where one side has no measurement."""
    if not a and b:
        return "new"
    if a and not b:
        return "gone"
    if a_ok:
        return "broken"
    return "fixed" if b_ok else "not measured"
