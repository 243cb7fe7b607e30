"""Pairing of records by block, round and execution."""

from __future__ import annotations

import time
from typing import Any

import pytest

from jobs.results.record import BlockPlace, Record
from jobs.verdicts.pairs import Pair, paired_rounds
from tests.jobs.results_folder import failed, ok, record, run

BASELINE, CANDIDATE = run(0), run(1)


def execution(
    round: int,
    times: tuple[Any, Any, Any] = (1.0, 2.0, 1.5),
    name: str | None = None,
    start: float = 1000.0,
    boot: str | None = "boot",
    **changes: Any,
) -> list[Record]:
    """Return the records of an execution: baseline, candidate, baseline again.

    `times` has a time in ms or an outcome for each.
    """
    made = []
    for index, each in enumerate(times):
        outcome = each if isinstance(each, dict) else ok(each)
        outcome = outcome | {"environment": {"boot_id": boot} if boot else {}}
        place = BlockPlace(
            id="b" * 12,
            round=round,
            execution=name or f"e{round}",
            position=index,
            size=3,
            baseline=index != 1,
            second=index == 2,
        )
        which = CANDIDATE if index == 1 else BASELINE
        attempt = record(which, outcome, repeat=round, finished_at=start + 10 * round + index)
        made.append(attempt.model_copy(update={"block": place} | changes))
    return made


def only(pairs: list[Pair]) -> Pair:
    (pair,) = pairs
    return pair


def test_rounds_have_the_medians_of_their_processes() -> None:
    records = execution(0, (ok(1.0, 9.0, 2.0), 3.0, 4.0)) + execution(1)
    pair = only(paired_rounds(records[::-1]))
    assert (pair.candidate, pair.baseline, pair.phase) == (CANDIDATE.id, BASELINE.id, "forward")
    assert [(each.baseline, each.candidate) for each in pair.rounds] == [
        ((2.0, 4.0), 3.0),
        ((1.0, 1.5), 2.0),
    ]
    assert pair.left_out == {}


def test_several_ranks_count_as_the_slowest() -> None:
    ranks = {"status": "ok", "measurements": {"samples_ms": {"step": [[1.0, 5.0], [4.0, 2.0]]}}}
    pair = only(paired_rounds(execution(0, (ranks, ranks, ranks))))
    assert pair.rounds[0].candidate == 4.5


def test_a_phase_that_only_the_first_round_measures_is_not_compared() -> None:
    both = {"status": "ok", "measurements": {"samples_ms": {"forward": [1.0], "long": [9.0]}}}
    records = execution(0, (both, both, 1.0)) + execution(1)
    assert [pair.phase for pair in paired_rounds(records)] == ["forward"]
    alone = paired_rounds(execution(0, (both, both, both)))
    assert [pair.phase for pair in alone] == ["forward", "long"]


def test_one_round_counts_in_each_allocation() -> None:
    records = execution(0, name="here") + execution(0, name="there", boot="other")
    pair = only(paired_rounds(records))
    assert len({each.allocation for each in pair.rounds}) == 2


def test_jobs_without_the_id_of_the_boot_are_allocations() -> None:
    records = execution(0, name="first", boot=None) + execution(0, name="second", boot=None, job=1)
    assert len({each.allocation for each in only(paired_rounds(records)).rounds}) == 2


@pytest.mark.parametrize(
    ("times", "reason"),
    [
        ((1.0, failed("oom"), 1.0), "oom"),
        ((1.0, 1.0, failed("timeout")), "baseline: timeout"),
        ((1.0, ok(1.0, phase="other"), 1.0), "no such phase"),
        ((1.0, 0.0, 1.0), "time of 0 ms"),
        ((0.0, 1.0, 1.0), "baseline: time of 0 ms"),
    ],
)
def test_a_round_without_a_time_is_left_out(times: tuple[Any, Any, Any], reason: str) -> None:
    pairs = {pair.phase: pair for pair in paired_rounds(execution(0, times) + execution(1))}
    assert len(pairs["forward"].rounds) == 1
    assert pairs["forward"].left_out == {reason: 1}


def test_devices_are_not_mixed() -> None:
    records = execution(0) + execution(1, device="cpu: other")
    assert [len(pair.rounds) for pair in paired_rounds(records)] == [1, 1]


def test_the_same_run_of_another_checkout_can_be_the_baseline() -> None:
    records = execution(0)
    old = [each.model_copy(update={"run": CANDIDATE.id, "checkout": "v1"}) for each in records[::2]]
    pair = only(paired_rounds([old[0], records[1], old[1]]))
    assert (pair.candidate, pair.candidate_checkout) == (CANDIDATE.id, "")
    assert (pair.baseline, pair.baseline_checkout) == (CANDIDATE.id, "v1")


def test_without_aa_a_round_has_one_time_of_the_baseline() -> None:
    records = [
        each.model_copy(update={"block": each.block.model_copy(update={"size": 2})})
        for each in execution(0)[:2]
        if each.block
    ]
    assert only(paired_rounds(records)).rounds[0].baseline == (1.0,)


@pytest.mark.slow  # no faster test: it measures a speed
def test_10_000_records_are_paired_in_a_second() -> None:
    outcome = ok(*[1.0 + index / 100 for index in range(100)])
    records = [
        each.model_copy(update={"block": each.block.model_copy(update={"id": str(index)})})
        for index in range(33)
        for each in execution(0, (outcome,) * 3)
        if each.block
    ]
    many = records * 100  # the same objects, in which only the executions differ
    copies = [
        each.model_copy(
            update={"block": each.block.model_copy(update={"execution": str(n), "round": n})}
        )
        for n, each in ((index // len(records), each) for index, each in enumerate(many))
        if each.block
    ]
    start = time.process_time()
    pairs = paired_rounds(copies)
    assert time.process_time() - start < 3  # 0.1 on a fast processor
    assert [len(pair.rounds) for pair in pairs] == [100] * 33
