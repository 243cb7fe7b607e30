"""Two results folders, run by run: faster, slower, same or unsure, knowing the noise.

The interval of the ratio of medians comes from the bootstrap (Efron 1979): samples are drawn again
from the samples, whole repeats first where there are several, because samples of one process share
its clock, its memory and its luck.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jobs.observation import Observation
from jobs.record import Measurements
from jobs.report.entries import Entry, entries
from jobs.report.values import slowest
from jobs.run import Run

Key = tuple[str, str]  # run id, device
RESAMPLES = 1000
CONFIDENCE = 95.0
MIN_SAMPLES = 5  # of fewer, a bootstrap says less than it seems to
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
        if not self.before or self.after is None:
            return None
        return self.after / self.before


def bootstrap_ratio(
    before: list[np.ndarray], after: list[np.ndarray], rng: np.random.Generator
) -> tuple[float, float]:
    """The interval of median(after) / median(before); of each, the samples, one array a repeat."""
    with np.errstate(divide="ignore", invalid="ignore"):  # a median of 0: no interval, unsure
        ratios = _medians(after, rng) / _medians(before, rng)
    edge = (100 - CONFIDENCE) / 2
    low, high = np.percentile(ratios, [edge, 100 - edge])
    return float(low), float(high)


def _medians(repeats: list[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """Medians of samples drawn again, repeats first, then as many samples as each repeat has."""
    lengths = np.array([len(samples) for samples in repeats])
    padded = np.full((len(repeats), lengths.max()), np.nan)
    for row, samples in zip(padded, repeats, strict=True):
        row[: len(samples)] = samples
    chosen = rng.integers(0, len(repeats), (RESAMPLES, len(repeats)))
    counts = lengths[chosen][..., None]
    places = (rng.random((*chosen.shape, lengths.max())) * counts).astype(int)
    drawn = padded[chosen[..., None], places]
    drawn[np.broadcast_to(np.arange(lengths.max()) >= counts, drawn.shape)] = np.nan
    drawn = np.sort(drawn.reshape(RESAMPLES, -1), axis=1)  # NaN goes last
    total = lengths[chosen].sum(axis=1)
    every = np.arange(RESAMPLES)
    medians: np.ndarray = (drawn[every, (total - 1) // 2] + drawn[every, total // 2]) / 2
    return medians


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
    _share_devices(old, new)
    _share_devices(new, old)
    rng = np.random.default_rng(0)
    result: list[Comparison] = []
    for key in {**old, **new}:
        a, b = old.get(key, []), new.get(key, [])
        run, device = (b or a)[0].run, key[1]
        a_ok, b_ok = _ok(a), _ok(b)
        for phase in dict.fromkeys(phase for m in (*a_ok, *b_ok) for phase in m.samples_ms):
            times = [
                [slowest(m, phase) for m in side if phase in m.samples_ms] for side in (a_ok, b_ok)
            ]
            if all(times):
                result.append(_measured(run, device, phase, times[0], times[1], rng, tolerance))
            elif a_ok and b_ok:
                says = "gone" if times[0] else "new"
                result.append(Comparison(run, device, phase, None, None, None, None, says))
        if not a_ok or not b_ok:
            says = _without(a, b, a_ok, b_ok)
            result.append(Comparison(run, device, "", None, None, None, None, says))
    return result


def _measured(
    run: Run,
    device: str,
    phase: str,
    before: list[np.ndarray],
    after: list[np.ndarray],
    rng: np.random.Generator,
    tolerance: float,
) -> Comparison:
    a, b = (float(np.median(np.concatenate(side))) for side in (before, after))
    if min(sum(map(len, before)), sum(map(len, after))) < MIN_SAMPLES:
        return Comparison(run, device, phase, a, b, None, None, "unsure")
    low, high = bootstrap_ratio(before, after, rng)
    return Comparison(run, device, phase, a, b, low, high, verdict(low, high, tolerance))


def _grouped(observation: Observation) -> dict[Key, list[Entry]]:
    groups: dict[Key, list[Entry]] = {}
    for entry in entries(observation):
        groups.setdefault((entry.run.id, entry.device), []).append(entry)
    return groups


def _share_devices(side: dict[Key, list[Entry]], other: dict[Key, list[Entry]]) -> None:
    """A run that left no record on a side has no device there: it is missing on the other's."""
    for run, device in [key for key in side if not key[1]]:
        theirs = [key for key in other if key[0] == run and key[1]]
        if theirs:
            missing = side.pop((run, device))
            side.update({key: missing for key in theirs if key not in side})


def _ok(side: list[Entry]) -> list[Measurements]:
    """The measurements of the repeats that have some."""
    records = [entry.record for entry in side if entry.state == "ok"]
    return [r.measurements for r in records if r is not None and r.measurements is not None]


def _without(
    a: list[Entry], b: list[Entry], a_ok: list[Measurements], b_ok: list[Measurements]
) -> str:
    """The verdict where one side has no measurement."""
    if a_ok:
        if not b:
            return "gone"
        return "not measured" if all(entry.state.is_live for entry in b) else "broken"
    if b_ok:
        return "fixed" if a else "new"
    return "not measured"
