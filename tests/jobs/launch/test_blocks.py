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
    run,
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
    done = run("jobs.submit", sweep, "--local", "--out", out)
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
def test_more_rounds_go_on_and_a_new_run_repeats_all_rounds(tmp_path: Path) -> None:
    """A run that is added to a block must be measured in turn with the others."""
    sweep, out = block_sweep(tmp_path, OK[:2]), tmp_path / "out"
    command = ("jobs.submit", sweep, "--local", "--out", out)
    assert run(*command).returncode == 0
    assert run(*command, "blocks.rounds=3").returncode == 0
    assert [n for n, _ in order(records(out))] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    block_sweep(tmp_path, OK)
    assert run(*command).returncode == 0
    assert [n for n, _ in order(records(out)[9:])] == [0] * 4 + [1] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_a_round_that_was_cut_is_repeated(tmp_path: Path, number: signal.Signals) -> None:
    fifo = Fifo(tmp_path / "fifo")
    waiting = {"what": "pause", "tag": 1, "path": str(fifo.path)}
    sweep, out = block_sweep(tmp_path, [{"what": "ok"}, waiting], rounds=3), tmp_path / "out"
    queue = start("jobs.submit", sweep, "--local", "--out", out)
    pid, _ = fifo.pids()  # in round 0
    worker = parent_of(parent_of(pid))
    queue.send_signal(number)
    queue.wait(PATIENCE_S)
    await_true(lambda: not alive(pid) and not alive(worker), "the run and its worker to end")
    before = records(out)
    assert [n for n, _ in order(r for r in before if r.status == "ok")] == [0]
    fifo.release()
    done = run("jobs.submit", sweep, "--local", "--out", out)
    assert done.returncode == 0, done.stdout
    found = records(out)[len(before) :]
    assert order(found) == [(0, 0), (0, 1), (0, 0), (1, 0), (1, 1), (1, 0), (2, 0), (2, 1), (2, 0)]
    cut = {r.block.execution for r in before if r.block}
    assert cut.isdisjoint(execution for _, execution in executions(found))


@pytest.mark.slow
def test_complete_rounds_are_kept(tmp_path: Path) -> None:
    fifo = Fifo(tmp_path / "fifo")
    waiting = {"what": "wait_in_round", "tag": 1, "path": str(fifo.path)}
    sweep, out = block_sweep(tmp_path, [{"what": "ok"}, waiting], rounds=3), tmp_path / "out"
    queue = start("jobs.submit", sweep, "--local", "--out", out)
    fifo.pids()  # in round 1
    queue.send_signal(signal.SIGINT)
    queue.wait(PATIENCE_S)
    assert [n for n, _ in order(records(out))][:4] == [0, 0, 0, 1]
    count = len(records(out))
    fifo.release()
    planned = call("jobs.submit", sweep, "--local", "--out", out, "--dry-run").stdout
    assert "to run" in planned and "6 (3 done" in planned
    assert run("jobs.submit", sweep, "--local", "--out", out).returncode == 0
    assert [n for n, _ in order(records(out)[count:])] == [1, 1, 1, 2, 2, 2]


@pytest.mark.slow
def test_a_worker_that_dies_repeats_its_round(tmp_path: Path) -> None:
    """After the second death during a run, the round goes on without this run."""
    cases = [{"what": "ok"}, {"what": "kill_worker", "tag": 1}]
    sweep, out = block_sweep(tmp_path, cases, rounds=1), tmp_path / "out"
    done = run("jobs.submit", sweep, "--local", "--out", out)
    assert done.returncode == 1
    found = records(out)
    assert order(found) == [(0, 0), (0, 0), (0, 0), (0, 1), (0, 0)]
    assert [r.status for r in found] == ["ok", "ok", "ok", "killed", "ok"]
    assert sorted(executions(found).values()) == [1, 1, 3]


@pytest.mark.slow
def test_a_failure_that_would_repeat_is_not_executed_again(tmp_path: Path) -> None:
    cases = [{"what": "ok"}, {"what": "wrong", "tag": 1}, {"what": "raises", "tag": 2}]
    sweep, out = block_sweep(tmp_path, cases), tmp_path / "out"
    assert run("jobs.submit", sweep, "--local", "--out", out).returncode == 1
    failures = [r.failure.message for r in records(out) if r.failure and r.status == "wrong"]
    assert len(failures) == 2 and failures[1].startswith("not executed again")
    errors = [r.failure.message for r in records(out) if r.failure and r.status == "error"]
    assert len(errors) == 2 and errors[0] == errors[1]  # executed twice
    again = call("jobs.submit", sweep, "--local", "--out", out)
    assert again.returncode == 1 and "4 that failed before" in again.stdout.replace("runs ", "")
    count = len(records(out))
    assert run("jobs", "retry", out).returncode == 1
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
    assert run("jobs.submit", sweep, "--debug", "--out", out).returncode == 0
    assert order(records(out)) == [(0, 0), (0, 1), (0, 0), (1, 0), (1, 1), (1, 0)]


@pytest.mark.slow
def test_ranks_are_started_for_each_run_of_a_round(tmp_path: Path) -> None:
    sweep = block_sweep(tmp_path, OK[:2], rounds=1, launch={"nproc_per_node": 2})
    out = tmp_path / "out"
    done = run("jobs.submit", sweep, "--local", "--out", out)
    assert done.returncode == 0, done.stdout
    assert order(records(out)) == [(0, 0), (0, 1), (0, 0)]
    assert [options(r)["check"] for r in records(out)] == [True, True, False]


@pytest.mark.slow
def test_force_measures_complete_rounds_again(tmp_path: Path) -> None:
    sweep, out = block_sweep(tmp_path, OK[:2], rounds=1), tmp_path / "out"
    for count in (3, 6):
        assert run("jobs.submit", sweep, "--local", "--force", "--out", out).returncode == 0
        assert len(records(out)) == count
    assert list(executions(records(out)).values()) == [3, 3]


@pytest.mark.slow
def test_a_round_is_done_only_by_its_latest_execution(tmp_path: Path) -> None:
    """Reports show the latest execution of a round, here with another baseline."""
    sweep, out = block_sweep(tmp_path, OK[:2], rounds=1), tmp_path / "out"
    for count, baseline in ((3, 0), (6, 1), (9, 0), (9, 0)):
        key = f"blocks.baseline={{tag: {baseline}}}"
        assert run("jobs.submit", sweep, "--local", "--out", out, key).returncode == 0
        assert len(records(out)) == count
