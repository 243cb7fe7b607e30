"""Verdicts on simulated and constructed rounds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from jobs.verdicts.judge import (
    Round,
    Verdict,
    aa_floor,
    decide,
    floor_of_block,
    holm,
    judge,
)
from scripts.simulate_verdicts import DESIGNS, NOISES, Design, Noise, _row, main, simulate

ROOT = Path(__file__).parents[3]
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


def cell(verdict: str, p: float | None) -> Verdict:
    return Verdict(verdict, 1.0, None, None, p, 5, 1, None)  # type: ignore[arg-type]


@given(ROUNDS)
def test_one_allocation_agrees_with_scipys_t_test(given_rounds: list[Round]) -> None:
    one = [Round("a", each.baseline, each.candidate) for each in given_rounds]
    logs = [math.log(r.candidate) - math.log(r.baseline[0] * r.baseline[1]) / 2 for r in one]
    if max(logs) - min(logs) < 1e-6:
        return
    verdict, expected = judge(one), stats.ttest_1samp(logs, 0)
    interval = expected.confidence_interval(0.95)
    assert verdict.p == pytest.approx(expected.pvalue, rel=1e-6)
    assert math.log(verdict.low or 0) == pytest.approx(interval.low, abs=1e-9)
    assert math.log(verdict.high or 0) == pytest.approx(interval.high, abs=1e-9)


def test_several_allocations_agree_with_scipys_t_test_of_their_means() -> None:
    means = [0.01, 0.03, 0.02]
    several = [
        each
        for index, mean in enumerate(means)
        for each in rounds(math.exp(mean - 0.05), math.exp(mean + 0.05), allocation=str(index))
    ]
    verdict, expected = judge(several), stats.ttest_1samp(means, 0)
    assert (verdict.rounds, verdict.allocations) == (6, 3)
    assert verdict.p == pytest.approx(expected.pvalue)
    assert math.log(verdict.high or 0) == pytest.approx(expected.confidence_interval(0.95).high)


def test_allocations_have_equal_weights() -> None:
    uneven = rounds(1.1, 1.1, 1.1) + rounds(1 / 1.1, allocation="b")
    assert judge(uneven).ratio == pytest.approx(1)


@given(ROUNDS, st.sampled_from([0.001, 0.37, 1024.0]))
def test_a_common_factor_changes_nothing(given_rounds: list[Round], factor: float) -> None:
    scaled = [
        Round(r.allocation, (r.baseline[0] * factor, r.baseline[1] * factor), r.candidate * factor)
        for r in given_rounds
    ]
    before, after = judge(given_rounds, 0.1), judge(scaled, 0.1)
    assert after.ratio == pytest.approx(before.ratio)
    assert after.low == pytest.approx(before.low, rel=1e-9)
    assert aa_floor([scaled]) == pytest.approx(aa_floor([given_rounds]), abs=1e-12)


@given(ROUNDS)
def test_swapping_gives_the_inverse(given_rounds: list[Round]) -> None:
    single = [Round(r.allocation, r.baseline[:1], r.candidate) for r in given_rounds]
    swapped = [Round(r.allocation, (r.candidate,), r.baseline[0]) for r in single]
    before, after = judge(single), judge(swapped)
    opposite = {"faster": "slower", "slower": "faster"}
    assert after.verdict == opposite.get(before.verdict, before.verdict)
    assert after.ratio == pytest.approx(1 / before.ratio)
    if before.low:
        assert after.high == pytest.approx(1 / before.low)
    assert after.rounds_needed == before.rounds_needed


def test_a_slowdown_beyond_noise_and_floor_is_slower() -> None:
    slow = rounds(1.05, 1.051, 1.049, 1.05, 1.052)
    assert judge(slow, 0.01, floor=0.01).verdict == "slower"
    assert judge(slow, 0.01, floor=0.06).verdict == "unsure"


def test_without_a_floor_differences_up_to_the_margin_are_not_slower() -> None:
    beside = rounds(1.0098, 1.0099, 1.01, 1.0098, 1.0103)
    assert judge(beside, 0.01, floor=0.001).verdict == "slower"
    assert judge(beside, 0.01, floor=None).verdict == "unsure"


def test_same_is_decided_before_slower() -> None:
    close = judge(rounds(1.004, 1.0041, 1.0039, 1.004, 1.0042), 0.01, floor=0.001)
    assert close.verdict == "same"
    assert close.p is not None and close.p < 0.01


def test_equal_times_are_the_same() -> None:
    equal = judge(rounds(1.0, 1.0, 1.0))
    assert (equal.verdict, equal.ratio, equal.p) == ("same", 1.0, 1.0)


def test_a_single_round_is_unsure_without_an_interval() -> None:
    single = judge(rounds(1.5))
    assert (single.verdict, single.rounds_needed) == ("unsure", None)
    assert (single.low, single.high, single.p) == (None, None, None)


def test_a_verdict_of_each_allocation_holds_for_all() -> None:
    first = rounds(1.02, 1.021, 1.019, 1.02, 1.0205)
    second = rounds(1.03, 1.031, 1.029, 1.03, 1.0305, allocation="b")
    opposite = rounds(0.97, 0.971, 0.969, 0.97, 0.9705, allocation="b")
    assert judge(first + second, floor=0.001).verdict == "slower"
    assert judge(first + opposite, floor=0.001).verdict == "unsure"


def test_the_rounds_that_are_needed_decide() -> None:
    few = rounds(1.03, 0.99, 1.04)
    needed = judge(few, floor=0.005).rounds_needed
    assert needed is not None and needed > 3
    many = (few * needed)[: 3 * math.ceil(needed / 3)]
    assert judge(many, floor=0.005).verdict == "slower"


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
    assert judge(quiet, floor=own).verdict == "slower"
    assert floor_of_block(noisy, 0.003) == 0.003
    assert floor_of_block([Round("a", (1.0,), 1.0)], None) is None


def test_without_aa_there_is_no_floor() -> None:
    assert aa_floor([[Round("a", (1.0,), 1.0)] * 5]) is None
    assert aa_floor([]) is None
    assert aa_floor([rounds(1.0)]) is None


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_times_must_be_positive(bad: float) -> None:
    with pytest.raises(ValueError, match="time must be finite and greater than 0, got"):
        judge([Round("a", (1.0, 1.0), bad)])


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="at least one round, got none"):
        judge([])
    with pytest.raises(ValueError, match="margin must be greater than 0 and less than 1, got 0"):
        judge(rounds(1.0), margin=0)
    with pytest.raises(ValueError, match="floor must be finite and at least 0, got -1"):
        judge(rounds(1.0), floor=-1)


def test_holm_multiplies_the_smallest_by_the_number_of_cells() -> None:
    assert holm([0.01, 0.5, 0.02]) == pytest.approx([0.03, 0.5, 0.04])
    assert holm([]) == []


@pytest.mark.parametrize(
    ("cells", "code"),
    [
        ([("same", 0.3), ("faster", 1e-6)], 0),
        ([("same", 0.3), ("slower", 1e-6), ("unsure", None)], 1),
        ([("slower", 0.008), ("same", 0.3)], 3),  # 0.016 after the adjustment
        ([("slower", 0.008)], 1),
        ([("same", 0.3), ("unsure", 0.02)], 3),
        ([], 3),
    ],
)
def test_exit_codes(cells: list[tuple[str, float | None]], code: int) -> None:
    assert decide([cell(*each) for each in cells]) == code


# Limits of binomial counts: with the true probability at its target, a correct count exceeds its
# limit in one of a million seeds.
BLOCKS = 2000


@pytest.mark.slow
@pytest.mark.parametrize("noise", [NOISES[1], NOISES[4]], ids=lambda noise: noise.name)
def test_verdicts_of_the_same_code(noise: Noise) -> None:
    outcome = simulate(noise, Design(1, 5), BLOCKS)
    false = outcome.verdicts["faster"] + outcome.verdicts["slower"]
    assert false <= stats.binom(BLOCKS, 0.01).isf(1e-6)
    covered = stats.binom(BLOCKS, 0.95)
    assert covered.ppf(1e-6) <= outcome.covered <= covered.isf(1e-6)


def test_a_slowdown_of_5_percent_is_found() -> None:
    outcome = simulate(NOISES[1], Design(1, 5), 500, slowdown=0.05)
    assert outcome.verdicts["slower"] >= stats.binom(500, 0.99).ppf(1e-6)


DOCUMENTED = (ROOT / "docs" / "verdicts.md").read_text()


@pytest.mark.slow
def test_the_documentation_shows_a_row_of_the_simulated_table() -> None:
    row = _row(NOISES[1], DESIGNS[0], 10_000)
    assert f"\n| {' | '.join(row)} |\n" in DOCUMENTED


@pytest.mark.slow
@pytest.mark.depends("docs/verdicts.md")
def test_the_documentation_shows_the_simulated_table(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    assert capsys.readouterr().out in DOCUMENTED
