"""Decides whether candidates are faster or slower than their baselines, from the rounds of blocks.

docs/verdicts.md explains the statistics and shows how often they are wrong. Functions import scipy
when they need it, because this takes up to a second.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Literal

import numpy as np

from jobs.results.record import Record

MARGIN = 0.01  # default relative difference up to which two times count as the same
LEVEL = 0.005  # largest p value of the verdicts faster and slower
CONFIDENCE = 0.95  # of the interval
ONE_SIDED = 0.05  # level of one-sided tests: those of the verdict same, and of `not_slower`
EXIT_LEVEL = 0.05  # largest p value of a slowdown, adjusted for all cells, with exit code 1
UNLIKE_LEVEL = 0.01  # largest p value with which allocations count as different
FEWEST_SHARED = 3  # a cell with fewer rounds does not share its variance with other cells
# Weight of the variance that cells share, in degrees of freedom, is at most this.
MOST_SHARED = 10.0
DISTRUST = 4  # how fast a larger variance of its own makes a cell independent of the others
MANY_BLOCKS = 20  # number of blocks from which the A/A floor is an empirical quantile
RESOLUTION_MS = 32e-6  # of CUDA events
_TINY = 1e-12  # added to variances that must not be 0; equal ratios differ by rounding only

Decision = Literal["faster", "slower", "same", "unsure"]


@dataclass(frozen=True, slots=True)
class Round:
    """Times of a baseline and a candidate that were measured in one round of a block."""

    allocation: str  # identifies the GPUs and the boot of the host
    baseline: tuple[float, ...]  # one or two times in ms; the second is that of the A/A process
    candidate: float  # time in ms
    resolution_ms: float = 0.0  # step of the clock that measured the times
    records: tuple[Record, ...] = ()  # of the baseline, and last the candidate

    @property
    def log_ratio(self) -> float:
        """Logarithm of candidate / baseline. The baseline is the geometric mean of its times."""
        return math.log(self.candidate) - fmean([math.log(time) for time in self.baseline])


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of comparing a candidate with its baseline."""

    verdict: Decision
    ratio: float  # candidate / baseline, geometric mean
    low: float | None  # 95% confidence interval of the ratio; None with a single round
    high: float | None
    p: float | None  # two-sided p value of the ratio 1; None with a single round, or few repeats
    rounds: int  # of two folders: processes
    allocations: int
    floor: float | None  # relative difference that the same code shows; None: not measured
    # Whether the candidate is at most the margin slower, with a confidence of 95%.
    not_slower: bool = False
    # Whether the candidate, if it is slower, is so by more than the margin.
    beyond_margin: bool = True
    # If allocations differ by more than noise, and in their verdicts or by so much that the
    # interval contains 1: the verdict and the ratio of each allocation alone.
    unlike: tuple[tuple[str, Decision, float], ...] = ()

    @property
    def why_unsure(self) -> list[str]:
        """Why an interval that does not contain 1 is not enough, and what is known nevertheless."""
        found = []
        if self.low and self.high and self.p is not None and not self.low <= 1 <= self.high:
            limit = "margin" if self.floor is None else "A/A floor"
            found.append(f"p {100 * self.p:.2g}%" if self.p >= LEVEL else f"within the {limit}")
        return [*found, *(["not slower by more than the margin"] if self.not_slower else [])]

    @property
    def inverse(self) -> Verdict:
        """The same comparison with the two sides exchanged, as tables need it."""
        words: dict[Decision, Decision] = {"faster": "slower", "slower": "faster"}
        return replace(
            self,
            verdict=words.get(self.verdict, self.verdict),
            ratio=1 / self.ratio,
            low=1 / self.high if self.high else None,
            high=1 / self.low if self.low else None,
        )


def judge(
    cells: Sequence[Sequence[Round]],
    margin: float,
    floors: Sequence[float | None],
    one_sided: float = ONE_SIDED,
) -> list[Verdict]:
    """Compare each of several candidates with its baseline.

    The interval and the p value are those of Student's t over the log ratios of the rounds. The
    variance of a cell is combined with that of all cells, see `_shared`.

    Args:
        cells: for each cell, the complete rounds of one block, phase and device. There is at least
            one, and all times are greater than 0. The cells have the same kind of device.
        margin: relative difference up to which two times count as the same, such as 0.01.
        floors: for each cell, the relative difference that the same code shows, see `aa_floor`. A
            difference up to the floor is never faster or slower. None: unknown; the margin is used
            instead.
        one_sided: level of the tests for the verdict same.
    """
    found = _shared([_Logs.of(rounds) for rounds in cells])
    return [
        _verdict(logs, margin, floor, one_sided) for logs, floor in zip(found, floors, strict=True)
    ]


def _verdict(logs: _Logs, margin: float, floor: float | None, one_sided: float) -> Verdict:
    same, whole = math.log1p(margin), logs.pooled
    if not logs.freedom:  # a single round
        ratio, is_beyond = math.exp(whole.mean), whole.mean > same
        return Verdict("unsure", ratio, None, None, None, 1, 1, floor, beyond_margin=is_beyond)
    least = same if floor is None else math.log1p(floor)
    alone = [whole]
    if logs.are_unlike:
        whole, alone = logs.over_allocations, logs.alone
    decisions = [each.decision(same, least, one_sided) for each in alone]
    agree = len(set(decisions)) == 1
    unlike = zip(logs.names, decisions, map(math.exp, logs.means), strict=True)
    verdict = decisions[0] if agree else "unsure"
    half = whole.half_width(CONFIDENCE)
    # Of several allocations that are all faster, or all slower
    contains_1 = verdict in ("faster", "slower") and abs(whole.mean) <= half
    return Verdict(
        verdict,
        ratio=math.exp(whole.mean),
        low=_exp(whole.mean - half),
        high=_exp(whole.mean + half),
        p=max(each.p for each in alone) if agree else 1.0,
        rounds=sum(logs.counts),
        allocations=len(logs.counts),
        floor=floor,
        not_slower=all(e.mean + e.half_width(1 - 2 * ONE_SIDED) < same for e in alone),
        beyond_margin=whole.mean > same,
        unlike=tuple(unlike) if contains_1 or not agree else (),
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

    found = [logs for block in blocks if (logs := _aa_logs(block))]
    means = [abs(fmean(logs)) for logs in found]
    squares = [log * log for logs in found for log in logs]
    if len(squares) < 2:
        return None
    if len(means) >= MANY_BLOCKS:
        return math.expm1(float(np.quantile(means, CONFIDENCE)))
    # Blocks with different numbers of rounds have means of different variances.
    variance = fmean(squares) * fmean([1 / len(logs) for logs in found])
    bound = float(stdtrit(len(squares), 1 - (1 - CONFIDENCE) / 2)) * math.sqrt(variance)
    return math.expm1(bound)


def _aa_logs(rounds: Sequence[Round]) -> list[float]:
    pairs = [each.baseline for each in rounds if len(each.baseline) == 2]
    return [math.log(b) - math.log(a) for a, b in pairs]


def floor_of_block(rounds: Sequence[Round], pooled: float | None) -> float | None:
    """Return the A/A floor that applies to a block.

    Blocks of other shapes or precisions can be much noisier than this one. So the floor of all
    blocks with the same phase and device (`pooled`, None if unknown) does not apply if that of the
    block alone is smaller. Fewer rounds give a larger floor. It is at least the mean difference
    that the same code showed in this block.
    """
    known = [floor for floor in (aa_floor([rounds]), pooled) if floor is not None]
    if not known:
        return None
    logs = _aa_logs(rounds)
    return max(min(known), math.expm1(abs(fmean(logs))) if logs else 0.0)


def established(verdicts: Sequence[Verdict]) -> list[bool]:
    """Return whether each candidate is slower by more than the margin, among all that are judged.

    The p values are adjusted by the method of Holm: if nothing changed, at most 5 of 100
    comparisons have such a candidate, however many cells they have.
    """
    # Two folders without repeats have no p value. Their floor alone decides.
    known = [float(each.verdict != "slower") if each.p is None else each.p for each in verdicts]
    significant = -1.0  # the largest p value that is small enough for its rank
    for i, p in enumerate(sorted(known)):
        if p * (len(known) - i) >= EXIT_LEVEL:
            break
        significant = p
    return [
        each.verdict == "slower" and each.beyond_margin and p <= significant
        for each, p in zip(verdicts, known, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean of logarithms, judged by Student's t."""

    mean: float
    error: float  # standard error of the mean
    freedom: float  # degrees of freedom

    @property
    def p(self) -> float:
        """Two-sided p value of the mean 0."""
        from scipy.special import stdtr

        if self.error == 0:
            return 1.0 if self.mean == 0 else 0.0
        return 2 * float(stdtr(self.freedom, -abs(self.mean) / self.error))

    def half_width(self, confidence: float) -> float:
        """Return the half width of the interval of the mean."""
        from scipy.special import stdtrit

        return float(stdtrit(self.freedom, 1 - (1 - confidence) / 2)) * self.error

    def decision(self, same: float, least: float, one_sided: float) -> Decision:
        """Return the verdict. `same` and `least` are the logarithms of the margin and the floor."""
        if abs(self.mean) + self.half_width(1 - 2 * one_sided) < same:
            return "same"
        if self.p < LEVEL and abs(self.mean) > least:
            return "slower" if self.mean > 0 else "faster"
        return "unsure"


@dataclass(frozen=True, slots=True)
class _Logs:
    """Means of the log ratios of a cell by allocation, and their variance within an allocation."""

    names: tuple[str, ...]  # of the allocations
    means: tuple[float, ...]
    counts: tuple[int, ...]  # numbers of rounds
    variance: float  # of one round
    freedom: float  # degrees of freedom of the variance; 0: there is a single round
    # Variance of the mean because clocks have steps. It is the same in every round, because times
    # that differ by less than a step are always rounded to the same steps.
    blur: float

    @classmethod
    def of(cls, rounds: Sequence[Round]) -> _Logs:
        groups: dict[str, list[float]] = {}
        for round in rounds:
            groups.setdefault(round.allocation, []).append(round.log_ratio)
        means = tuple(map(fmean, groups.values()))
        counts = tuple(map(len, groups.values()))
        freedom = sum(counts) - len(counts)
        squares = [
            (log - mean) ** 2 for mean, logs in zip(means, groups.values(), strict=True)
            for log in logs
        ]  # fmt: skip
        if freedom == 0 and len(means) > 1:
            # One round in each allocation: noise and the variation of hosts cannot be told apart.
            freedom, whole = len(means) - 1, fmean(means)
            squares = [(mean - whole) ** 2 for mean in means]
        variance = math.fsum(squares) / max(freedom, 1)
        return cls(tuple(groups), means, counts, variance, freedom, _blur(rounds))

    @property
    def pooled(self) -> Estimate:
        """The mean over rounds, whatever their allocation."""
        count = sum(self.counts)
        sums = (count * mean for count, mean in zip(self.counts, self.means, strict=True))
        return Estimate(math.fsum(sums) / count, self._error(count), self.freedom)

    @property
    def alone(self) -> list[Estimate]:
        """The mean of each allocation. They have the same variance."""
        return [
            Estimate(mean, self._error(count), self.freedom)
            for count, mean in zip(self.counts, self.means, strict=True)
        ]

    @property
    def over_allocations(self) -> Estimate:
        """The mean over allocations, with an error that includes the variation of hosts."""
        count = len(self.means)
        error = math.sqrt(np.var(self.means, ddof=1) / count)
        return Estimate(fmean(self.means), error, count - 1)

    def _error(self, count: int) -> float:
        return math.sqrt(self.variance / count + self.blur)

    @property
    def are_unlike(self) -> bool:
        """Whether the allocations differ by more than the noise of their rounds (F test)."""
        from scipy.special import fdtrc

        others = len(self.means) - 1
        if not others or sum(self.counts) == len(self.counts):
            return False
        whole = np.average(self.means, weights=self.counts)
        between = sum(n * (m - whole) ** 2 for n, m in zip(self.counts, self.means, strict=True))
        ratio = between / others / (self.variance + self.blur + _TINY)
        return float(fdtrc(others, self.freedom, ratio)) < UNLIKE_LEVEL


def _blur(rounds: Sequence[Round]) -> float:
    """Return the variance of the log ratio because times are rounded to steps of the clock."""
    step = max(round.resolution_ms for round in rounds)
    times = (
        min(round.candidate for round in rounds),
        min(time for round in rounds for time in round.baseline),
    )
    return sum((step / time) ** 2 / 12 for time in times)  # variance of a uniform distribution


def _shared(cells: Sequence[_Logs]) -> list[_Logs]:
    """Return the cells with variances that use what all cells show together.

    Few rounds know their variance badly. Their variances are taken as draws from one distribution,
    a scaled inverse chi-squared one, whose scale and degrees of freedom come from all cells (Smyth,
    2004, "Linear models and empirical Bayes methods", sections 3 and 6). The variance of a cell is
    then the mean of its own and the shared one, weighted by their degrees of freedom. A cell with a
    larger variance may be noisier than the others. It keeps its own variance, and the larger that
    is, the fewer degrees of freedom of the others it gets, so that it does not become sure.
    """
    own = [each for each in cells if sum(each.counts) >= FEWEST_SHARED]
    if len(own) < 2:
        return list(cells)
    scale, freedom = _prior([each.variance + _TINY for each in own], [e.freedom for e in own])
    whole = sum(each.freedom for each in own)
    shared = []
    for each in cells:
        if sum(each.counts) < FEWEST_SHARED:
            shared.append(each)
            continue
        others = min(freedom, MOST_SHARED, whole - each.freedom)
        mean = (others * scale + each.freedom * each.variance) / (others + each.freedom)
        variance = max(mean, each.variance)
        trust = (mean / variance) ** DISTRUST if variance else 1.0
        shared.append(replace(each, variance=variance, freedom=each.freedom + others * trust))
    return shared


def _prior(variances: Sequence[float], freedoms: Sequence[float]) -> tuple[float, float]:
    """Return the scale and the degrees of freedom of the distribution of variances.

    They are such that the logarithms of observed variances have the observed mean and variance.
    """
    from scipy.special import polygamma, psi

    half = np.array(freedoms) / 2
    logs = np.log(variances) - psi(half) + np.log(half)
    spread = float(np.var(logs, ddof=1) - np.mean(polygamma(1, half)))
    if spread <= 0:
        return math.exp(float(np.mean(logs))), math.inf
    shared = _trigamma_inverse(spread)
    return math.exp(float(np.mean(logs)) + float(psi(shared)) - math.log(shared)), 2 * shared


def _trigamma_inverse(value: float) -> float:
    """Return x such that trigamma(x) is the given positive value, by Newton's method on 1/value."""
    from scipy.special import polygamma

    x = 0.5 + 1 / value
    for _ in range(50):
        found = float(polygamma(1, x))
        step = found * (1 - found / value) / float(polygamma(2, x))
        x += step
        if abs(step) < 1e-8 * x:
            break
    return x


def _exp(value: float) -> float:
    """Return exp(value), or infinity if it is too large for a float."""
    return math.exp(value) if value < 700 else math.inf
