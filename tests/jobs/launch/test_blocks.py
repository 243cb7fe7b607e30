"""Blocks on this machine: the order of their runs, and what is repeated after an interruption."""

from __future__ import annotations

import csv
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from jobs.frame.results import list_results
from jobs.results.record import Record
from jobs.results.run_states import observe
from tests.jobs.harness import call, facts, records, write_sweep


def block_sweep(
    folder: Path, cases: list[dict[str, Any]], rounds: int | str = 2, **keys: Any
) -> Path:
    """Write a sweep of one block, whose baseline has tag 0."""
    blocks = {"interleave": ["what", "tag", "path"], "baseline": {"tag": 0}, "rounds": rounds}
    return write_sweep(folder, cases, blocks=blocks, **keys)


def order(found: Iterable[Record]) -> list[tuple[int, int]]:
    """Return round, or -1 in a trial, and tag of each record, in the order of execution."""
    return [(-1 if r.block.trial else r.block.round, r.params["tag"]) for r in found if r.block]


def executions(found: Iterable[Record]) -> Counter[tuple[int, str]]:
    """Return the number of records of each execution of a round."""
    rounds = (r.block for r in found if r.block and not r.block.trial)
    return Counter((place.round, place.execution) for place in rounds)


def options(record: Record) -> dict[str, Any]:
    return json.loads(facts(record)["environment"]["RUN_ROUND"])


OK = [{"what": "ok", "tag": 1}, {"what": "ok"}, {"what": "ok", "tag": 2}]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of a block of three rounds."""
    folder = tmp_path_factory.mktemp("block")
    sweep, out = block_sweep(folder, OK, 3, fixed={"artifact": "trace"}), folder / "out"
    done = call("jobs.submit", sweep, "--local", "--out", out)
    assert done.returncode == 0, done.stdout
    return out


def test_a_trial_and_then_rounds_in_changing_order(measured: Path) -> None:
    found = records(measured)
    orders = {-1: [0, 1, 2], 0: [0, 1, 0, 2], 1: [2, 0, 1, 0], 2: [0, 2, 0, 1]}
    assert order(found) == [(n, tag) for n, tags in orders.items() for tag in tags]
    assert len({facts(r)["pid"] for r in found}) == len({facts(r)["server"] for r in found}) * 15
    assert all(r.artifacts == f"artifacts/{r.run}-{r.repeat}-{r.attempt}" for r in found)
    assert len({r.allocation for r in found}) == 1 and found[0].allocation is not None
    for record in found:
        assert record.block.size == 4 - record.block.trial
        assert record.block.baseline == (record.params["tag"] == 0)
    assert [r.block.position for r in found if r.block] == [0, 1, 2, *[0, 1, 2, 3] * 3]
    second = [(r.block.round, r.block.position) for r in found if r.block and r.block.second]
    assert second == [(0, 2), (1, 1), (2, 0)]
    assert list(executions(found).values()) == [4, 4, 4]


def test_the_trial_checks_the_output_and_gives_all_rounds_one_hold(measured: Path) -> None:
    """Its times are not shown, but what it checked is, once for each run."""
    trial, rounds = records(measured)[:3], records(measured)[3:]
    assert all(options(r)["check"] and options(r)["hold_ms"] == 0.0 for r in trial)
    assert not any(options(r)["check"] for r in rounds)
    hold = max(facts(r)["hold_ms"] for r in trial)
    assert {options(r)["hold_ms"] for r in rounds} == {hold}
    shown = list_results(observe(measured))
    assert {id(r.record) for r in shown}.isdisjoint(map(id, trial)) and len(shown) == 12
    checked = [r for r in shown if r.record and "relative_error" in facts(r.record)]
    assert sorted((r.run.params["tag"], r.repeat) for r in checked) == [(0, 0), (1, 0), (2, 0)]
    listed = call("aggregate", "attempts", measured, "--format", "csv").stdout
    why = Counter(row["why"] for row in csv.DictReader(listed.splitlines()))
    assert why == {"its round is complete": 12, "trial of its block": 3}


@pytest.mark.slow
def test_what_the_next_submission_of_a_block_measures(tmp_path: Path) -> None:
    """A run that is added must be measured in turn with the others, and so must a new baseline.

    Reports show the latest execution of a round. What was tried on this machine is not tried again,
    except the baseline.
    """
    sweep, out = block_sweep(tmp_path, OK[:2]), tmp_path / "out"
    tried: list[list[int]] = []

    def measured(*options: str) -> list[int]:
        """Submit again, and return the round of each new record of a round."""
        before = len(records(out)) if out.exists() else 0
        assert call("jobs.submit", sweep, "--local", "--out", out, *options).returncode == 0
        new = order(records(out)[before:])
        tried.append([tag for n, tag in new if n < 0])
        return [n for n, _ in new if n >= 0]

    assert measured() == [0] * 3 + [1] * 3
    assert measured("blocks.rounds=3") == [2] * 3
    for baseline, new in ((1, [0] * 3), (0, [0] * 3), (0, [])):
        assert measured("blocks.rounds=1", f"blocks.baseline={{tag: {baseline}}}") == new
    assert measured("blocks.rounds=1", "--force") == [0] * 3
    assert Counter(n for n, _ in executions(records(out))) == {0: 4, 1: 1, 2: 1}
    block_sweep(tmp_path, OK)
    assert measured() == [0] * 4 + [1] * 4
    rounds = [options(record) for record in records(out)[-8:]]
    holds = {r.run: facts(r)["hold_ms"] for r in records(out) if r.block and r.block.trial}
    assert not any(round["check"] for round in rounds)
    assert {round["hold_ms"] for round in rounds} == {max(holds.values())}
    assert measured("--force") == [0] * 4 + [1] * 4
    assert [tags for tags in tried if tags] == [[0, 1], [0], [0, 2], [0, 1, 2]]


@pytest.mark.slow
def test_a_block_is_measured_until_it_is_decided(tmp_path: Path) -> None:
    """Then its other rounds are not needed. A block of noise ends after the most rounds."""
    sweep, out = block_sweep(tmp_path, OK[:2], rounds="auto"), tmp_path / "out"
    done = call("jobs.submit", sweep, "--local", "--out", out)
    assert done.returncode == 0 and "21 runs not needed" in done.stderr + done.stdout
    assert order(records(out))[-1][0] == 2
    status = call("jobs", "status", out)
    assert status.returncode == 0 and "sweep misbehave, 30 processes, 1 sub" in status.stdout
    assert "blocks: 1 decided after 3 rounds" in status.stdout
    states = json.loads(call("jobs", "status", out, "--json").stdout)["counts"]
    assert states == {"ok": 9, "not_needed": 21}
    assert call("aggregate", "compare", out).returncode == 0
    assert "not_needed" not in call("aggregate", out).stdout
    again = call("jobs.submit", sweep, "--local", "--out", out)
    assert "nothing to submit" in again.stdout and len(records(out)) == 11
    call("jobs.submit", sweep, "--local", "--out", out, "--rounds", "4")
    assert order(records(out))[-1][0] == 3

    noise = {"what": "unsteady", "path": str(tmp_path / "calls")}
    cases = [{"what": "ok"}, {**noise, "tag": 1}]
    sweep, out = block_sweep(tmp_path, cases, rounds="auto"), tmp_path / "noisy"
    measured = call("jobs.submit", sweep, "--local", "--out", out, "blocks.max_rounds=4")
    assert measured.returncode == 0 and order(records(out))[-1][0] == 3
    told = call("jobs", "status", out).stdout
    assert "1 undecided" in told and "after 4 rounds: undecided" in told
    assert call("aggregate", "compare", out).returncode == 3
    call("jobs.submit", sweep, "--local", "--out", out, "blocks.max_rounds=5")
    assert order(records(out))[-1][0] == 4


@pytest.mark.slow
def test_a_worker_that_dies_repeats_its_round(tmp_path: Path) -> None:
    """After the second death during a run, the round goes on without this run."""
    cases = [{"what": "ok"}, {"what": "kill_worker", "tag": 1}]
    sweep, out = block_sweep(tmp_path, cases, rounds=1), tmp_path / "out"
    assert call("jobs.submit", sweep, "--local", "--out", out).returncode == 1
    found = records(out)
    assert order(found) == [(0, 0), (0, 0), (0, 0), (0, 1), (0, 0)]
    assert [r.status for r in found] == ["ok", "ok", "ok", "killed", "ok"]
    assert sorted(executions(found).values()) == [1, 1, 3]


@pytest.mark.slow
def test_a_failure_that_would_repeat_is_not_executed_again(tmp_path: Path) -> None:
    cases = [{"what": "ok"}, {"what": "wrong", "tag": 1}, {"what": "raises", "tag": 2}]
    sweep, out = block_sweep(tmp_path, cases), tmp_path / "out"
    assert call("jobs.submit", sweep, "--local", "--out", out).returncode == 1
    trial = next(r for r in records(out) if r.status == "wrong")
    assert str(trial.log) in call("jobs", "logs", trial.run, "--in", out).stdout
    failures = [r.failure.message for r in records(out) if r.failure and r.status == "wrong"]
    again = "not executed again, because it ended so in the trial: "
    assert failures == ["off by 0.5", *[f"{again}off by 0.5"] * 2]
    errors = [r.failure.message for r in records(out) if r.failure and r.status == "error"]
    assert len(errors) == 3 and len(set(errors)) == 1  # executed each time
    again = call("jobs.submit", sweep, "--local", "--out", out)
    assert again.returncode == 1 and "4 runs that failed before" in again.stdout
    count = len(records(out))
    assert call("jobs", "retry", out).returncode == 1
    assert [n for n, _ in order(records(out)[count:])] == [-1] * 3 + [0] * 4 + [1] * 4


@pytest.mark.slow
def test_debug_executes_rounds_in_the_foreground(tmp_path: Path) -> None:
    sweep, out = block_sweep(tmp_path, OK[:2]), tmp_path / "out"
    assert call("jobs.submit", sweep, "--debug", "--out", out).returncode == 0
    assert order(records(out)) == [(0, 0), (0, 1), (0, 0), (1, 0), (1, 1), (1, 0)]
