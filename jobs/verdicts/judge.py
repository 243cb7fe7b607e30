"""Decides whether a candidate is faster or slower than its baseline, from the rounds of a block.

docs/verdicts.md explains the statistics and shows how often they are wrong. Functions import scipy
when they need it, because this takes up to a second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import numpy as np

MARGIN = 0.01  # default relative difference up to which two times count as the same
LEVEL = 0.01  # largest p value of the verdicts faster and slower
CONFIDENCE = 0.95  # of the interval
TOST_LEVEL = 0.05  # of each of the two one-sided tests for the verdict same
POWER = 0.8  # probability with which `Verdict.rounds_needed` rounds lead to a verdict
MOST_ROUNDS = 1000  # largest number of rounds that a sweep accepts
MANY_BLOCKS = 20  # number of blocks from which the A/A floor is an empirical quantile

Decision = Literal["faster", "slower", "same", "unsure"]


@dataclass(frozen=True, slots=True)
class Round:
    """Times of a baseline and a candidate that were measured in one round of a block."""

    allocation: str  # identifies the GPUs and the boot of the host
    baseline: tuple[float, ...]  # one or two times in ms; the second is that of the A/A process
    candidate: float  # time in ms

    @property
    def log_ratio(self) -> float:
        """Logarithm of candidate / baseline. The baseline is the geometric mean of its times."""
        return _log(self.candidate) - _mean([_log(time) for time in self.baseline])

    @property
    def aa_log_ratio(self) -> float | None:
        """Logarithm of second / first time of the baseline. None if there is only one time."""
        if len(self.baseline) < 2:
            return None
        first, second = self.baseline
        return _log(second) - _log(first)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of comparing a candidate with its baseline."""

    verdict: Decision
    ratio: float  # candidate / baseline, geometric mean
    low: float | None  # 95% confidence interval of the ratio; None with a single round
    high: float | None
    p: float | None  # two-sided p value of the ratio 1; None with a single round
    rounds: int
    allocations: int
    floor: float | None  # relative difference that the same code shows; None: not measured
    # Number of rounds in each allocation that would probably decide, if the verdict is unsure.
    # None: the verdict is not unsure, or no number up to 1000 would decide.
    rounds_needed: int | None = None


def judge(rounds: Sequence[Round], margin: float = MARGIN, floor: float | None = None) -> Verdict:
    """Compare a candidate with its baseline.

    The interval and the p value are those of Student's t over the log ratios of the rounds. With
    several allocations they are those of t over the means of the allocations, which have equal
    weights. A verdict also holds if each allocation alone gives it.

    Args:
        rounds: complete rounds of one block, phase and device. All times must be greater than 0.
        margin: relative difference up to which two times count as the same, such as 0.01.
        floor: relative difference that the same code shows, see `aa_floor`. A difference up to the
            floor is never faster or slower. None: unknown; the margin is used instead.

    Raises:
        ValueError: if there is no round, or a time, the margin or the floor is not valid.
    """
    if not rounds:
        raise ValueError("rounds must contain at least one round, got none")
    if not 0 < margin < 1:
        raise ValueError(f"margin must be greater than 0 and less than 1, got {margin}")
    if floor is not None and not (0 <= floor < math.inf):
        raise ValueError(f"floor must be finite and at least 0, got {floor}")
    alone = [_Estimate.of(logs) for logs in _by_allocation(rounds)]
    whole = alone[0] if len(alone) == 1 else _Estimate.of([each.mean for each in alone])
    same = math.log1p(margin)
    least = same if floor is None else math.log1p(floor)
    p = _p_value(whole, alone)
    verdict: Decision = "unsure"
    if whole.lies_within(same) or all(each.lies_within(same) for each in alone):
        verdict = "same"
    elif p is not None and p < LEVEL and abs(whole.mean) > least:
        verdict = "slower" if whole.mean > 0 else "faster"
    half = whole.half_width(1 - (1 - CONFIDENCE) / 2)
    return Verdict(
        verdict,
        ratio=math.exp(whole.mean),
        low=None if half is None else _exp(whole.mean - half),
        high=None if half is None else _exp(whole.mean + half),
        p=p,
        rounds=len(rounds),
        allocations=len(alone),
        floor=floor,
        rounds_needed=_rounds_needed(alone, same, least) if verdict == "unsure" else None,
    )


def aa_floor(blocks: Iterable[Sequence[Round]]) -> float | None:
    """Return the relative difference that the same code shows between its two A/A processes.

    The floor is the 95% quantile of |mean A/A log ratio| of a block. From 20 blocks on, it is the
    quantile of the observed means. Fewer blocks have no reliable 95% quantile. Then the floor is
    the two-sided bound of Student's t from the A/A log ratios of all rounds, whose true mean is 0.

    Args:
        blocks: for each block, the rounds of one of its candidates, in which the times of the
            baseline are those of the block. All blocks have the same phase and device.

    Returns:
        The floor, such as 0.004. None if there are fewer than two rounds with A/A times.
    """
    from scipy.special import stdtrit

    found = [
        [log for round in block if (log := round.aa_log_ratio) is not None] for block in blocks
    ]
    means = [abs(_mean(logs)) for logs in found if logs]
    squares = [log * log for logs in found for log in logs]
    if len(squares) < 2:
        return None
    if len(means) >= MANY_BLOCKS:
        return math.expm1(float(np.quantile(means, CONFIDENCE)))
    # Blocks with different numbers of rounds have means of different variances.
    variance = _mean(squares) * _mean([1 / len(logs) for logs in found if logs])
    bound = float(stdtrit(len(squares), 1 - (1 - CONFIDENCE) / 2)) * math.sqrt(variance)
    return math.expm1(bound)


def floor_of_block(rounds: Sequence[Round], pooled: float | None) -> float | None:
    """Return the A/A floor that applies to a block.

    Blocks of other shapes or precisions can be much noisier than this one. So the floor of all
    blocks with the same phase and device (`pooled`, None if unknown) does not apply if that of the
    block alone is smaller. Fewer rounds give a larger floor.
    """
    known = [floor for floor in (aa_floor([rounds]), pooled) if floor is not None]
    return min(known, default=None)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values that are adjusted for their number by the method of Holm."""
    count = len(p_values)
    order = np.argsort(p_values)
    adjusted = np.empty(count)
    # The smallest counts as often as there are values, the largest once.
    products = np.asarray(p_values)[order] * np.arange(count, 0, -1)
    adjusted[order] = np.minimum(np.maximum.accumulate(products), 1)
    result: list[float] = adjusted.tolist()
    return result


def decide(verdicts: Sequence[Verdict]) -> int:
    """Return the exit code for the verdicts of all cells.

    Returns:
        1 if a cell is slower, after the p values of all cells are adjusted by the method of Holm:
        if nothing changed, at most 1 of 100 comparisons exits with 1, however many cells there are.
        0 if every cell is same or faster.
        3 otherwise: a cell is unsure, or slower only before the adjustment, or there are no cells.
    """
    if not verdicts:
        return 3
    if any(each.verdict == "slower" for each in verdicts):
        adjusted = holm([1.0 if each.p is None else each.p for each in verdicts])
        slower = (p for p, each in zip(adjusted, verdicts, strict=True) if each.verdict == "slower")
        if min(slower) < LEVEL:
            return 1
    return 0 if all(each.verdict in ("same", "faster") for each in verdicts) else 3


@dataclass(frozen=True, slots=True)
class _Estimate:
    """Mean and standard deviation of logarithms."""

    mean: float
    deviation: float | None  # None: there is only one value
    count: int

    @classmethod
    def of(cls, logs: Sequence[float]) -> _Estimate:
        mean, count = _mean(logs), len(logs)
        if count == 1:
            return cls(mean, None, 1)
        squares = math.fsum((log - mean) ** 2 for log in logs)
        return cls(mean, math.sqrt(squares / (count - 1)), count)

    @property
    def error(self) -> float | None:
        """Standard error of the mean."""
        return None if self.deviation is None else self.deviation / math.sqrt(self.count)

    @property
    def p(self) -> float | None:
        """Two-sided p value of the mean 0, as of scipy.stats.ttest_1samp."""
        from scipy.special import stdtr

        if self.error is None:
            return None
        if self.error == 0:
            return 1.0 if self.mean == 0 else 0.0
        return 2 * float(stdtr(self.count - 1, -abs(self.mean) / self.error))

    def half_width(self, quantile: float) -> float | None:
        """Return the half width of an interval whose upper end is this quantile of the mean."""
        if self.error is None:
            return None
        return float(_t_quantiles(quantile)[self.count - 1]) * self.error

    def lies_within(self, limit: float) -> bool:
        """Return whether both one-sided tests say that the mean is between -limit and limit."""
        half = self.half_width(1 - TOST_LEVEL)
        return half is not None and abs(self.mean) + half < limit


def _p_value(whole: _Estimate, alone: list[_Estimate]) -> float | None:
    """Return the p value of the ratio 1, of all allocations or of each allocation alone.

    The second is the largest p value, if all allocations have the same direction. Two or three
    means of allocations have a t distribution with such heavy tails that even a large difference
    is not significant.
    """
    if len(alone) == 1:
        return whole.p
    found = [each.p for each in alone]
    agree = all(each.mean > 0 for each in alone) or all(each.mean < 0 for each in alone)
    worst = max((1.0 if p is None else p for p in found), default=1.0) if agree else 1.0
    return None if whole.p is None else min(whole.p, worst)


def _rounds_needed(alone: list[_Estimate], same: float, least: float) -> int | None:
    """Return the number of rounds in each allocation after which the verdict is probably decided.

    Each allocation must decide with the probability `POWER`, if its mean and its standard deviation
    are those observed.
    """
    needed = [_alone_needed(each, same, least) for each in alone]
    known = [count for count in needed if count is not None]
    return max(known) if len(known) == len(needed) else None


def _alone_needed(estimate: _Estimate, same: float, least: float) -> int | None:
    if not estimate.deviation:
        return None
    counts = np.arange(2, MOST_ROUNDS + 1)
    error = estimate.deviation / np.sqrt(counts)
    distance = abs(estimate.mean)
    # With n rounds, the test of a mean at distance d from its limit has about the power P if
    # d = (t of the level + t of P) * error.
    chance = _t_quantiles(POWER)[1:]
    decided = (_t_quantiles(1 - TOST_LEVEL)[1:] + chance) * error < same - distance
    if distance > least:
        decided |= (_t_quantiles(1 - LEVEL / 2)[1:] + chance) * error < distance
    return max(int(counts[decided.argmax()]), estimate.count + 1) if decided.any() else None


@cache
def _t_quantiles(quantile: float) -> np.ndarray:
    """Return this quantile of Student's t by degrees of freedom, from 0 (NaN) to the maximum."""
    from scipy.special import stdtrit

    found: np.ndarray = stdtrit(np.r_[np.nan, np.arange(1, MOST_ROUNDS)], quantile)
    return found


def _by_allocation(rounds: Sequence[Round]) -> list[list[float]]:
    """Return the log ratios of the rounds of each allocation."""
    logs: dict[str, list[float]] = {}
    for round in rounds:
        logs.setdefault(round.allocation, []).append(round.log_ratio)
    return list(logs.values())


def _log(time: float) -> float:
    if not 0 < time < math.inf:
        raise ValueError(f"time must be finite and greater than 0, got {time}")
    return math.log(time)


def _exp(value: float) -> float:
    """Return exp(value), or infinity if it is too large for a float."""
    return math.exp(value) if value < 700 else math.inf


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
