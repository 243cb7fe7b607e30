"""Compares the times of two results folders, run by run.

Each phase of a run gets a verdict, such as slower. The verdict depends on the ratio of the median
times in the two folders, and on the confidence interval of this ratio. The interval is computed
with the bootstrap method (Efron 1979), which draws random samples from the measured times, with
replacement. It first draws repeats and then times within each repeat, because times that were
measured in one process are correlated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jobs.code.short_names import short_names
from jobs.formatting import format_number, format_scalar
from jobs.report.metrics import slowest_rank
from jobs.report.results import Result, list_results
from jobs.results.record import Measurements
from jobs.results.run_states import Observation
from jobs.run import Run, varying

RunOnDevice = tuple[str, str]  # run id, device
RESAMPLES = 1000  # number of bootstrap resamples
CONFIDENCE = 95.0  # confidence level of the interval, in percent
MIN_SAMPLES = 5  # minimum per folder; with fewer, the bootstrap interval is too narrow
REGRESSIONS = ("slower", "broken")  # verdicts that make the command exit with code 1


@dataclass(frozen=True)
class Comparison:
    """Comparison between two results folders, for one phase of a run on one kind of device."""

    run: Run
    device: str
    phase: str  # "" if the verdict is on the whole run, such as broken
    verdict: str  # faster, slower, same, unsure; broken, fixed, new, gone, not measured
    before: float | None = None  # median time in milliseconds
    after: float | None = None  # median time in milliseconds
    low: float | None = None  # lower bound of the confidence interval of `ratio`
    high: float | None = None  # upper bound

    @property
    def ratio(self) -> float | None:
        """The median time `after` divided by the median time `before`."""
        if not self.before or self.after is None:
            return None
        return self.after / self.before


def bootstrap_ratio(
    before: list[np.ndarray], after: list[np.ndarray], rng: np.random.Generator
) -> tuple[float, float]:
    """Return the 95% confidence interval of the ratio median(after) / median(before).

    Args:
        before: times in the folder of the baseline, one array per repeat.
        after: times in the other folder, one array per repeat.
        rng: random number generator for the bootstrap.

    Returns:
        The lower and the upper bound of the interval. A bound can be NaN or infinite if the median
        of resampled `before` times is 0.
    """
    with np.errstate(divide="ignore", invalid="ignore"):  # a median of 0 gives NaN or inf
        ratios = _medians(after, rng) / _medians(before, rng)
    edge = (100 - CONFIDENCE) / 2
    low, high = np.percentile(ratios, [edge, 100 - edge])
    return float(low), float(high)


def _medians(repeats: list[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """Return the median of each of 1,000 bootstrap resamples, as an array.

    A resample is made in two steps. First, draw as many repeats as there are, with replacement.
    Then, from each drawn repeat, draw as many times as it has, with replacement.

    Args:
        repeats: measured times, one array per repeat.
        rng: random number generator.
    """
    lengths = np.array([len(samples) for samples in repeats])
    padded = np.full((len(repeats), lengths.max()), np.nan)
    for row, samples in zip(padded, repeats, strict=True):
        row[: len(samples)] = samples
    chosen = rng.integers(0, len(repeats), (RESAMPLES, len(repeats)))
    counts = lengths[chosen][..., None]
    places = (rng.random((*chosen.shape, lengths.max())) * counts).astype(int)
    drawn = padded[chosen[..., None], places]
    drawn[np.broadcast_to(np.arange(lengths.max()) >= counts, drawn.shape)] = np.nan
    drawn = np.sort(drawn.reshape(RESAMPLES, -1), axis=1)  # NaN sorts last
    total = lengths[chosen].sum(axis=1)
    every = np.arange(RESAMPLES)
    medians: np.ndarray = (drawn[every, (total - 1) // 2] + drawn[every, total // 2]) / 2
    return medians


def verdict(low: float, high: float, tolerance: float) -> str:
    """Return the verdict that follows from the confidence interval of the ratio after / before.

    Args:
        low, high: bounds of the interval.
        tolerance: relative difference that is ignored, such as 0.02.

    Returns:
        "faster" if the whole interval is below 1 - tolerance, "slower" if it is above
        1 + tolerance, "same" if it is between these limits, and "unsure" otherwise.
    """
    if high < 1 - tolerance:
        return "faster"
    if low > 1 + tolerance:
        return "slower"
    if low >= 1 - tolerance and high <= 1 + tolerance:
        return "same"
    return "unsure"


def compare(before: Observation, after: Observation, tolerance: float) -> list[Comparison]:
    """Compare the times of all runs in two results folders.

    Args:
        before: state of the folder of the baseline.
        after: state of the folder that is compared with the baseline.
        tolerance: relative difference that is ignored, such as 0.02.

    Returns:
        One comparison for each run, kind of device and phase. If a run has no measurements in one
        of the folders, it has one comparison with the phase "".
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
    """Compare the times of one phase of a run in two folders.

    Args:
        before: times in the folder of the baseline in milliseconds, one array per repeat.
        after: times in the other folder in milliseconds, one array per repeat.
        rng: random number generator for the bootstrap.
        tolerance: relative difference that is ignored, such as 0.02.

    Returns:
        The verdict, the median of `before`, the median of `after`, and the lower and upper bound of
        the confidence interval of the ratio of the medians. The bounds are None if `before` or
        `after` has fewer than 5 samples.
    """
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
    """Assign devices to the results of one folder whose device is unknown.

    The device is unknown if a run has no record in this folder. The run then gets the devices that
    it has in the other folder, so that its results in the two folders are compared.

    Args:
        side: results of this folder, by run and device. It is changed in place.
        other: results of the other folder, by run and device.
    """
    for run, device in [key for key in side if not key[1]]:
        theirs = [key for key in other if key[0] == run and key[1]]
        if theirs:
            missing = side.pop((run, device))
            side.update({key: missing for key in theirs if key not in side})


def _ok(side: list[Result]) -> list[Measurements]:
    """Return the measurements of the successful results in a list."""
    return [r.measurements for r in side if r.status == "ok" and r.measurements is not None]


def _verdict_without(
    a: list[Result], b: list[Result], a_ok: list[Measurements], b_ok: list[Measurements]
) -> str:
    """Return the verdict on a run that has no measurements in at least one of two folders.

    Args:
        a: results of the run in the folder of the baseline.
        b: results of the run in the other folder.
        a_ok: measurements of the successful results in `a`.
        b_ok: measurements of the successful results in `b`.

    Returns:
        One of "broken", "fixed", "new", "gone" and "not measured".
    """
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
    """Return a table of comparisons, as a dict from column header to cells.

    Args:
        chosen: comparisons to show, at least one.
        comparisons: all comparisons. The table has a column for each parameter whose value varies
            among the runs of these comparisons.
    """
    names = varying([comparison.run for comparison in comparisons])
    references = {reference for c in comparisons for reference in c.run.code}
    short = short_names(references, (c.run.params.get(name) for c in comparisons for name in names))
    several_benchmarks = len({comparison.run.benchmark for comparison in comparisons}) > 1
    several_devices = len({comparison.device for comparison in chosen}) > 1
    rows = []
    for c in chosen:
        row = {"benchmark": c.run.benchmark} if several_benchmarks else {}
        values = {name: c.run.params.get(name, "") for name in names}
        row |= {name: short.get(value) or format_scalar(value) for name, value in values.items()}
        if several_devices:
            row["device"] = c.device
        row["phase"] = c.phase
        row["before (ms)"] = format_number(c.before) if c.before is not None else ""
        row["after (ms)"] = format_number(c.after) if c.after is not None else ""
        row["after/before"] = f"{c.ratio:.3f}" if c.ratio is not None else ""
        row["95% interval"] = f"{c.low:.3f} to {c.high:.3f}" if c.low is not None else ""
        row["verdict"] = c.verdict
        rows.append(row)
    return {header: [row[header] for row in rows] for header in rows[0]}
