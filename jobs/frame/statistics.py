"""Reduces samples to one number, and estimates a mean from several processes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95  # of intervals
_QUANTILES = {"p10": 0.1, "median": 0.5, "p90": 0.9}
# How values of several processes are reduced, by the statistic of the samples of a process. Means
# add up: a step minus the step without communication is the exposed communication.
_OVER_PROCESSES = {"mean": "mean", "mean_std": "mean", "min": "min", "max": "max"}


def over_processes(name: str) -> str:
    """Return the statistic over processes, for a statistic of the samples of each process."""
    return _OVER_PROCESSES.get(name, "median")


def statistic(samples: np.ndarray, name: str) -> float:
    """Return a statistic of samples.

    There is at least one sample. Names are median, mean, min, max, std, p10, p90, spread, which is
    the interquartile range divided by the median, and mean_std, which gives the mean; the caller
    computes the standard deviation separately. That of one sample is 0, and so is a spread whose
    median is 0.
    """
    if name in _QUANTILES:
        return _quantile(np.sort(samples), _QUANTILES[name])
    if name == "spread":
        ordered = np.sort(samples)
        low, middle, high = (_quantile(ordered, q) for q in (0.25, 0.5, 0.75))
        return (high - low) / middle if middle else 0.0
    if name == "std":
        return float(np.std(samples, ddof=1)) if len(samples) > 1 else 0.0
    return float(getattr(np, name.removesuffix("_std"))(samples))  # mean, min, max


def mean_interval(groups: Sequence[Sequence[float]]) -> tuple[float, float] | None:
    """Return the ends of the 95% confidence interval of a mean, by Student's t.

    Values of processes are grouped by their allocation. With several allocations, the interval is
    that of the mean of their means, because processes of one allocation are not independent of each
    other. The result is None if there are fewer than two values.
    """
    from scipy.special import stdtrit  # slow to import

    values = groups[0] if len(groups) == 1 else [float(np.mean(group)) for group in groups]
    if len(values) < 2:
        return None
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    half = float(stdtrit(len(values) - 1, 1 - (1 - CONFIDENCE) / 2)) * error
    mean = float(np.mean(values))
    return mean - half, mean + half


def _quantile(ordered: np.ndarray, q: float) -> float:
    """Return the quantile `q` of sorted samples.

    Values between two samples are interpolated linearly. The result is the same as that of
    np.quantile, which is about 25 times slower on small arrays. A table of 100,000 records needs
    400,000 quantiles.
    """
    place = q * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return float(ordered[below] + (place - below) * (ordered[above] - ordered[below]))
