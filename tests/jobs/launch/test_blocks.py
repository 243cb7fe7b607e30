"""Blocks on this machine: the order of their runs, and what is repeated after an interruption."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from jobs.results.record import Record
from tests.jobs.harness import (
    PATIENCE_S,
    Fifo,
    alive,
    await_true,
    call,
    facts,
    parent_of,
    records,
    start,
    write_sweep,
)

INTERLEAVE = ["what", "tag", "path"]


def block_sweep(folder: Path, cases: list[dict[str, Any]], rounds: int = 2, **keys: Any) -> Path:
    """Write a sweep of one block, whose baseline has tag 0."""
    blocks = {"interleave": INTERLEAVE, "baseline": {"tag": 0}, "rounds": rounds}
    return write_sweep(folder, cases, blocks=blocks, **keys)


def order(found: Iterable[Record]) -> list[tuple[int, int]]:
    """Return round and tag of each record, in the order of execution."""
    return [(r.block.round, r.params["tag"]) for r in found if r.block]


def executions(found: Iterable[Record]) -> Counter[tuple[int, str]]:
    """Return the number of records of each execution of a round."""
    return Counter((r.block.round, r.block.execution) for r in found if r.block)


def options(record: Record) -> dict[str, Any]:
    environment: dict[str, str] = facts(record)["environment"]
    return json.loads(environment["RUN_ROUND"])  # type: ignore[no-any-return]


OK = [{"what": "ok", "tag": 1}, {"what": "ok"}, {"what": "ok", "tag": 2}]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("block")
    sweep, out = block_sweep(folder, OK, rounds=3), folder / "out"
    done = call("jobs.submit", sweep, "--local", "--out", out)
    assert done.returncode == 0, done.stdout
    return sweep, out


@pytest.mark.slow
def test_rounds_alternate_their_direction_in_fresh_processes(measured: tuple[Path, Path]) -> None:
    found = records(measured[1])
    forth = [0, 1, 2, 0]
    assert order(found) == [(n, tag) for n in range(3) for tag in forth[:: -1 if n == 1 else 1]]
    assert len({facts(r)["pid"] for r in found}) == len({facts(r)["server"] for r in found}) * 12
    assert len({r.allocation for r in found}) == 1 and found[0].allocation is not None
    for record in found:
        assert record.block is not None and record.block.size == 4
        assert record.block.baseline == (record.params["tag"] == 0)
    assert [r.block.position for r in found if r.block] == [0, 1, 2, 3] * 3
    second = [r.block.second for r in found if r.block]
    assert second == [False, False, False, True, True, *[False] * 6, True]
    assert set(executions(found).values()) == {4} and len(executions(found)) == 3


def test_status_and_dry_run_count_processes(measured: tuple[Path, Path]) -> None:
    assert "sweep misbehave, 12 processes, 1 sub" in call("jobs", "status", measured[1]).stdout
    planned = call("jobs.submit", measured[0], "--local", "--dry-run").stdout
    assert "3, 12 processes (rounds and A/A)" in planned


def test_only_the_first_round_includes_the_check(measured: tuple[Path, Path]) -> None:
    checked = order(record for record in records(measured[1]) if options(record)["check"])
    assert checked == [(0, 0), (0, 1), (0, 2)]


def test_a_complete_block_is_not_measured_again(measured: tuple[Path, Path]) -> None:
    sweep, out = measured
    again = call("jobs.submit", sweep, "--local", "--out", out)
    assert again.returncode == 0 and "skipping 12 runs with a result" in again.stdout
    assert len(records(out)) == 12
    status = json.loads(call("jobs", "status", out, "--json").stdout)
    assert status["counts"] == {"ok": 12}


@pytest.mark.slow
def test_what_the_next_submission_of_a_block_measures(tmp_path: Path) -> None:
    """A run that is added must be measured in turn with the others, and so must a new baseline.

    Reports show the latest execution of a round.
    """
    sweep, out = block_sweep(tmp_path, OK[:2]), tmp_path / "out"

    def measured(*options: str) -> list[int]:
        """Submit again, and return the round of each new record."""
        before = len(records(out)) if out.exists() else 0
        assert call("jobs.submit", sweep, "--local", "--out", out, *options).returncode == 0
        return [n for n, _ in order(records(out)[before:])]

    assert measured() == [0] * 3 + [1] * 3
    assert measured("blocks.rounds=3") == [2] * 3
    for baseline, new in ((1, [0] * 3), (0, [0] * 3), (0, [])):
        assert measured("blocks.rounds=1", f"blocks.baseline={{tag: {baseline}}}") == new
    assert measured("blocks.rounds=1", "--force") == [0] * 3
    assert Counter(n for n, _ in executions(records(out))) == {0: 4, 1: 1, 2: 1}
    block_sweep(tmp_path, OK)
    assert measured() == [0] * 4 + [1] * 4


@pytest.mark.slow
def test_a_round_that_was_cut_is_repeated_and_complete_rounds_are_kept(tmp_path: Path) -> None:
    """Each queue waits in its second round."""
    fifo = Fifo(tmp_path / "fifo")
    waiting = {"what": "wait_in_round", "tag": 1, "path": str(fifo.path)}
    sweep, out = block_sweep(tmp_path, [{"what": "ok"}, waiting], rounds=4), tmp_path / "out"
    command: list[str | Path] = ["jobs.submit", sweep, "--local", "--out", out]

    def interrupted(number: signal.Signals) -> None:
        queue = start(*command)
        pid, child = fifo.pids()
        worker = parent_of(parent_of(pid))
        queue.send_signal(number)
        queue.wait(PATIENCE_S)
        await_true(lambda: not any(map(alive, (pid, child, worker))), "the worker to end")

    interrupted(signal.SIGKILL)  # in round 1
    assert order(r for r in records(out) if r.status == "ok") == [(0, 0), (0, 1), (0, 0), (1, 0)]
    planned = call(*command, "--dry-run").stdout
    assert "to run" in planned and "9 (3 done" in planned
    interrupted(signal.SIGINT)  # in round 2
    fifo.release()
    assert call(*command).returncode == 0
    found = records(out)
    cut = [r for r in found if r.status == "cancelled"]
    assert order(cut) == [(1, 1), (2, 1)]
    assert order(found)[5:] == [
        *((1, tag) for tag in (0, 1, 0)),
        *((2, tag) for tag in (0, 1)),
        *((n, tag) for n in (2, 3) for tag in (0, 1, 0)),
    ]
    assert sorted(executions(found).values()) == [2, 2, 3, 3, 3, 3]


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
    failures = [r.failure.message for r in records(out) if r.failure and r.status == "wrong"]
    assert len(failures) == 2 and failures[1].startswith("not executed again")
    errors = [r.failure.message for r in records(out) if r.failure and r.status == "error"]
    assert len(errors) == 2 and errors[0] == errors[1]  # executed twice
    again = call("jobs.submit", sweep, "--local", "--out", out)
    assert again.returncode == 1 and "4 that failed before" in again.stdout.replace("runs ", "")
    count = len(records(out))
    assert call("jobs", "retry", out).returncode == 1
    assert [n for n, _ in order(records(out)[count:])] == [0] * 4 + [1] * 4


@pytest.mark.slow
def test_a_cancelled_run_leaves_the_rounds_of_the_others(tmp_path: Path) -> None:
    fifo = Fifo(tmp_path / "fifo")
    cases = [{"what": "pause", "path": str(fifo.path)}, {"what": "ok", "tag": 1}, OK[2]]
    sweep, out = block_sweep(tmp_path, cases), tmp_path / "out"
    queue = start("jobs.submit", sweep, "--local", "--out", out)
    fifo.pids()
    assert call("jobs", "cancel", out, "--where", "tag == 2").returncode == 0
    fifo.release()
    queue.wait(PATIENCE_S)
    found = records(out)
    assert Counter(r.status for r in found) == {"ok": 6, "cancelled": 2}
    assert {r.params["tag"] for r in found if r.status == "cancelled"} == {2}
    assert len(executions(found)) == 2


@pytest.mark.slow
def test_debug_executes_rounds_in_the_foreground(tmp_path: Path) -> None:
    sweep, out = block_sweep(tmp_path, OK[:2]), tmp_path / "out"
    assert call("jobs.submit", sweep, "--debug", "--out", out).returncode == 0
    assert order(records(out)) == [(0, 0), (0, 1), (0, 0), (1, 0), (1, 1), (1, 0)]
