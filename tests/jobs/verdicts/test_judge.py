"""Verdicts on simulated and constructed rounds."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from jobs.verdicts.judge import (
    RESOLUTION_MS,
    Round,
    Verdict,
    aa_floor,
    established,
    floor_of_block,
    judge,
)

TIMES = st.integers(900, 1100).map(float)
ROUND = st.builds(
    Round,
    allocation=st.sampled_from(["a", "b"]),
    baseline=st.tuples(TIMES, TIMES),
    candidate=TIMES,
)
ROUNDS = st.lists(ROUND, min_size=2, max_size=8)


def rounds(*ratios: float, allocation: str = "a", aa: float = 1.0) -> list[Round]:
    return [Round(allocation, (1.0, aa), ratio * math.sqrt(aa)) for ratio in ratios]


def alone(given: list[Round], margin: float = 0.01, floor: float | None = None) -> Verdict:
    """The verdict on a single cell."""
    (verdict,) = judge([given], margin, [floor])
    return verdict


@given(ROUNDS)
def test_one_allocation_agrees_with_scipys_t_test(given_rounds: list[Round]) -> None:
    one = [Round("a", each.baseline, each.candidate) for each in given_rounds]
    logs = [math.log(r.candidate) - math.log(r.baseline[0] * r.baseline[1]) / 2 for r in one]
    if max(logs) - min(logs) < 1e-6:
        return
    verdict, expected = alone(one), stats.ttest_1samp(logs, 0)
    interval = expected.confidence_interval(0.95)
    assert verdict.p == pytest.approx(expected.pvalue, rel=1e-6)
    assert math.log(verdict.low or 0) == pytest.approx(interval.low, abs=1e-9)
    assert math.log(verdict.high or 0) == pytest.approx(interval.high, abs=1e-9)


def test_like_allocations_are_pooled() -> None:
    """One more round on another host does not destroy a verdict that it agrees with."""
    ten = rounds(*(1.02 + 0.001 * (-1) ** i for i in range(10)))
    before, after = alone(ten), alone(ten + rounds(1.0195, allocation="b"))
    assert (before.verdict, after.verdict, after.allocations) == ("slower", "slower", 2)
    assert math.log(after.ratio) == pytest.approx(
        (10 * math.log(before.ratio) + math.log(1.0195)) / 11  # each round counts the same
    )
    assert after.p is not None and after.p < 1e-6


def test_unlike_allocations_are_told_apart() -> None:
    first = rounds(1.02, 1.021, 1.019, 1.02, 1.0205)
    second = rounds(1.03, 1.031, 1.029, 1.03, 1.0305, allocation="b")
    equal = rounds(1.0, 1.001, 0.999, 1.0, 1.0005, allocation="b")
    for other, verdict, decision in ((second, "slower", "slower"), (equal, "unsure", "same")):
        unlike = alone(first + other, floor=0.001)
        assert unlike.verdict == verdict
        assert unlike.low is not None and unlike.high is not None and unlike.low < 1 < unlike.high
        assert [each[:2] for each in unlike.unlike] == [("a", "slower"), ("b", decision)]
    means = [math.log(each.ratio) for each in (alone(first), alone(equal))]
    expected = stats.ttest_1samp(means, 0).confidence_interval(0.95)
    assert math.log(unlike.high or 0) == pytest.approx(expected.high)


def test_cells_share_what_they_show_about_noise() -> None:
    """Three rounds alone know their noise badly; beside equally noisy cells they decide."""
    draw = random.Random(1)
    quiet = [rounds(*(math.exp(draw.gauss(0, 0.003)) for _ in range(3))) for _ in range(20)]
    slow = rounds(1.0235, 1.0172, 1.0201)
    assert alone(slow, floor=0.005).verdict == "unsure"
    assert judge([*quiet, slow], 0.01, [0.005] * 21)[-1].verdict == "slower"
    # A cell that is much noisier than the others is judged nearly as if it were alone.
    noisy = rounds(1.06, 0.98, 1.03)
    beside, by_itself = judge([*quiet, noisy], 0.01, [0.005] * 21)[-1], alone(noisy, floor=0.005)
    assert beside.p == pytest.approx(by_itself.p, rel=0.1)


def test_steps_of_the_clock_are_no_difference() -> None:
    """Times of 3 us that always fall on neighbouring steps of 32 ns differ by 1%."""
    step = RESOLUTION_MS
    stepped = [Round("a", (94 * step,) * 2, 95 * step, step) for _ in range(10)]
    assert alone(stepped, floor=0.0).verdict == "unsure"
    exact = [Round("a", r.baseline, r.candidate) for r in stepped]
    assert alone(exact, floor=0.0).verdict == "slower"


@given(ROUNDS)
def test_swapping_gives_the_inverse(given_rounds: list[Round]) -> None:
    single = [Round(r.allocation, r.baseline[:1], r.candidate) for r in given_rounds]
    swapped = [Round(r.allocation, (r.candidate,), r.baseline[0]) for r in single]
    before, after = alone(single), alone(swapped)
    opposite = {"faster": "slower", "slower": "faster"}
    assert after.verdict == opposite.get(before.verdict, before.verdict)
    assert after.ratio == pytest.approx(1 / before.ratio)
    if before.low:
        assert after.high == pytest.approx(1 / before.low)


CLEAR, AT_MARGIN = (1.05, 1.051, 1.049, 1.05, 1.052), (1.0098, 1.0099, 1.01, 1.0098, 1.0103)


@pytest.mark.parametrize(
    ("ratios", "floor", "verdict", "not_slower"),
    [
        (CLEAR, 0.01, "slower", False),
        (CLEAR, 0.06, "unsure", False),
        (AT_MARGIN, 0.001, "slower", False),
        (AT_MARGIN, None, "unsure", False),  # without a floor, the margin is one
        ((1.004, 1.0041, 1.0039, 1.004, 1.0042), 0.001, "same", True),  # although p is small
        ((0.97, 1.0, 0.98), 0.001, "unsure", True),
        ((1.0, 1.0, 1.0), None, "same", True),
    ],
)
def test_a_difference_must_exceed_noise_floor_and_margin(
    ratios: tuple[float, ...], floor: float | None, verdict: str, not_slower: bool
) -> None:
    found = alone(rounds(*ratios), 0.01, floor)
    assert (found.verdict, found.not_slower) == (verdict, not_slower)


@pytest.mark.parametrize(
    ("low", "high", "p", "floor", "not_slower", "count"),
    [
        (0.99, 1.02, 0.3, 0.001, False, 0),  # the interval says it
        (1.01, 1.04, 0.02, 0.001, False, 1),  # p is too large
        (0.96, 0.99, 0.001, 0.3, True, 2),  # the same code differs as much
        (0.99, 1.005, 0.4, 0.001, True, 1),
        (None, None, None, None, False, 0),  # a single round
    ],
)
def test_why_a_cell_is_unsure(
    low: float, high: float, p: float, floor: float, not_slower: bool, count: int
) -> None:
    verdict = Verdict("unsure", 1.0, low, high, p, 3, 1, floor, not_slower)
    assert len(verdict.why_unsure) == count
    assert any("floor" in reason for reason in verdict.why_unsure) == (floor == 0.3)


def test_the_floor_of_few_blocks_is_students_bound() -> None:
    blocks = [[Round("a", (1.0, math.exp(x)), 1.0) for x in (0.01, -0.01)] for _ in range(2)]
    bound = stats.t(4).ppf(0.975) * 0.01 / math.sqrt(2)
    assert aa_floor(blocks) == pytest.approx(math.expm1(bound))


def test_the_floor_of_many_blocks_is_the_quantile_of_their_means() -> None:
    blocks = [[Round("a", (1.0, math.exp(x / 1000)), 1.0)] for x in range(101)]
    assert aa_floor(blocks) == pytest.approx(math.expm1(0.095))


def test_a_noisy_block_does_not_raise_the_floor_of_a_quiet_one() -> None:
    quiet = [Round("a", (1.0, 1.0 + 0.001 * (-1) ** i), 1.02) for i in range(4)]
    noisy = [Round("a", (1.0, 1.0 + 0.2 * (-1) ** i), 1.02) for i in range(4)]
    pooled = aa_floor([quiet, noisy])
    assert pooled is not None and pooled > 0.1
    own = floor_of_block(quiet, pooled)
    assert own == aa_floor([quiet]) and own is not None and own < 0.01
    assert alone(quiet, floor=own).verdict == "slower"
    assert floor_of_block(noisy, 0.003) == pytest.approx(abs(math.log(0.96)) / 2, rel=0.02)
    assert floor_of_block([Round("a", (1.0,), 1.0)], None) is None


def test_without_aa_there_is_no_floor() -> None:
    assert aa_floor([[Round("a", (1.0,), 1.0)] * 5]) is None
    assert aa_floor([]) is None
    assert aa_floor([rounds(1.0)]) is None


def test_a_slowdown_is_established_beyond_the_margin_and_among_all_cells() -> None:
    slow = Verdict("slower", 1.02, 1.01, 1.03, 0.004, 5, 1, None)
    same = replace(slow, verdict="same", p=0.3)
    assert established([slow, same]) == [True, False]
    assert not any(established([slow, *[same] * 20]))  # 0.084 after the adjustment
    assert not any(established([replace(slow, beyond_margin=False)]))
    # The smallest of three p values counts three times, the next one twice.
    for p_values, found in {
        (0.024, 0.5, 0.016): [True, False, True],
        (0.026, 0.5, 0.016): [False, False, True],
        (0.018, 0.5, 0.017): [False, False, False],
    }.items():
        assert established([replace(slow, p=p) for p in p_values]) == found
    assert established([]) == []
