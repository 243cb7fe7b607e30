"""Compares two results folders run by run: faster, slower, same or unsure, given the noise.

The interval of the ratio of medians comes from the bootstrap (Efron 1979): samples are drawn again
from the samples, whole repeats first where there are several, because samples of one process share
its clock, its memory and its luck.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jobs.formatting import format_number
from jobs.report.metrics import slowest_rank
from jobs.report.results import Result, list_results
from jobs.results.record import Measurements
from jobs.results.run_states import Observation
from jobs.run import Run, varying

RunOnDevice = tuple[str, str]  # run id, device
RESAMPLES = 1000
CONFIDENCE = 95.0
MIN_SAMPLES = 5  # a bootstrap of fewer says less than it seems to
REGRESSIONS = ("slower", "broken")


@dataclass(frozen=True)
class Comparison:
    """One phase of one run, before and after. Times are in ms; ratio = after / before."""

    run: Run
    device: str
    phase: str
    verdict: str  # faster, slower, same, unsure; broken, fixed, new, gone, not measured
    before: float | None = None
    after: float | None = None
    low: float | None = None  # of the ratio's interval
    high: float | None = None

    @property
    def ratio(self) -> float | None:
        if not self.before or self.after is None:
            return None
        return self.after / self.before


def bootstrap_ratio(
    before: list[np.ndarray], after: list[np.ndarray], rng: np.random.Generator
) -> tuple[float, float]:
    """The interval of median(after) / median(before).

    Args:
        before, after: the samples, one array a repeat.
    """
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
    """The verdict of an interval [low, high] of after/before.

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
    """Compare every phase of every run of either folder, on each kind of device.

    Args:
        before, after: the two folders.
        tolerance: a relative difference that does not matter.
    """
    old, new = _by_run_and_device(before), _by_run_and_device(after)
    _share_devices(old, new)
    _share_devices(new, old)
    rng = np.random.default_rng(0)
    comparisons: list[Comparison] = []
    for key in {**old, **new}:
        a, b = old.get(key, []), new.get(key, [])
        run, device = (b or a)[0].run, key[1]
        a_ok, b_ok = _ok(a), _ok(b)
        for phase in dict.fromkeys(phase for m in (*a_ok, *b_ok) for phase in m.samples_ms):
            old_ms, new_ms = (
                [slowest_rank(m, phase) for m in side if phase in m.samples_ms]
                for side in (a_ok, b_ok)
            )
            if old_ms and new_ms:
                numbers = _compare_samples(old_ms, new_ms, rng, tolerance)
                comparisons.append(Comparison(run, device, phase, *numbers))
            elif a_ok and b_ok:
                comparisons.append(Comparison(run, device, phase, "gone" if old_ms else "new"))
        if not a_ok or not b_ok:
            comparisons.append(Comparison(run, device, "", _verdict_without(a, b, a_ok, b_ok)))
    return comparisons


def _compare_samples(
    before: list[np.ndarray], after: list[np.ndarray], rng: np.random.Generator, tolerance: float
) -> tuple[str, float, float, float | None, float | None]:
    """The verdict, both medians, and the interval of their ratio."""
    a, b = (float(np.median(np.concatenate(side))) for side in (before, after))
    if min(sum(map(len, before)), sum(map(len, after))) < MIN_SAMPLES:
        return "unsure", a, b, None, None
    low, high = bootstrap_ratio(before, after, rng)
    return verdict(low, high, tolerance), a, b, low, high


def _by_run_and_device(observation: Observation) -> dict[RunOnDevice, list[Result]]:
    groups: dict[RunOnDevice, list[Result]] = {}
    for result in list_results(observation):
        groups.setdefault((result.run.id, result.device), []).append(result)
    return groups


def _share_devices(
    side: dict[RunOnDevice, list[Result]], other: dict[RunOnDevice, list[Result]]
) -> None:
    """A run that left no record on a side has no device there: it is missing on the other's."""
    for run, device in [key for key in side if not key[1]]:
        theirs = [key for key in other if key[0] == run and key[1]]
        if theirs:
            missing = side.pop((run, device))
            side.update({key: missing for key in theirs if key not in side})


def _ok(side: list[Result]) -> list[Measurements]:
    """The measurements of the repeats that have some."""
    return [r.measurements for r in side if r.status == "ok" and r.measurements is not None]


def _verdict_without(
    a: list[Result], b: list[Result], a_ok: list[Measurements], b_ok: list[Measurements]
) -> str:
    """The verdict where one side has no measurement."""
    if a_ok:
        if not b:
            return "gone"
        return "not measured" if all(result.status.is_live for result in b) else "broken"
    if b_ok:
        return "fixed" if a else "new"
    return "not measured"


def comparison_columns(
    chosen: list[Comparison], comparisons: list[Comparison]
) -> dict[str, list[str]]:
    """Make the table of some comparisons: its cells, by header.

    Args:
        comparisons: all of them; they say which parameters a row needs.
    """
    names = varying([comparison.run for comparison in comparisons])
    several_benchmarks = len({comparison.run.benchmark for comparison in comparisons}) > 1
    several_devices = len({comparison.device for comparison in chosen}) > 1
    rows = []
    for c in chosen:
        row = {"benchmark": c.run.benchmark} if several_benchmarks else {}
        row |= {name: str(c.run.params.get(name, "")) for name in names}
        if several_devices:
            row["device"] = c.device
        row["phase"] = c.phase
        row["before ms"] = format_number(c.before) if c.before is not None else ""
        row["after ms"] = format_number(c.after) if c.after is not None else ""
        row["after/before"] = f"{c.ratio:.3f}" if c.ratio is not None else ""
        row["95% interval"] = f"{c.low:.3f} to {c.high:.3f}" if c.low is not None else ""
        row["verdict"] = c.verdict
        rows.append(row)
    return {header: [row[header] for row in rows] for header in rows[0]}
