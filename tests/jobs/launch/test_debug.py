"""`--debug` executes runs in the foreground and stops at the first failure."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from jobs.results.heartbeat import HEARTBEAT
from tests.jobs.harness import (
    LEAKS,
    PATIENCE_S,
    Fifo,
    alive,
    artifacts_of,
    call,
    facts,
    only_record,
    records,
    run,
    start,
    statuses,
    write_sweep,
)

OK: dict[str, Any] = {"what": "ok"}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [None, 2])
def test_stops_at_the_first_failure_and_shows_its_traceback(
    tmp_path: Path, ranks: int | None
) -> None:
    failing = {"what": "raises", "rank": 1, "artifact": "trace"}
    cases = [OK, failing, {"what": "ok", "tag": 1}]
    sweep = write_sweep(tmp_path, cases, launch={"nproc_per_node": ranks} if ranks else {})
    out = tmp_path / "out"
    # The input is empty, so a debugger or a prompt would fail.
    process = start("jobs.submit", sweep, "--debug", "--out", out, environment=LEAKS)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert 'misbehave.py", line' in output and "in raises\n" in output
    assert "ValueError: the message [/red] of the exception" in output
    assert "stopped at the first failure" in output
    assert [record.status for record in records(out)] == ["ok", "error"]
    first, second = records(out)
    assert (facts(first)["pid"] == process.pid) is (ranks is None)
    assert second.failure.rank == (1 if ranks else None)
    assert artifacts_of(out, second).keys() == ({"trace0", "trace1"} if ranks else {"trace"})
    environment = facts(first)["environment"]
    assert environment.get("WORLD_SIZE") == (str(ranks) if ranks else None)
    assert "SLURM_JOB_ID" not in environment


def test_out_of_memory_and_unsupported_are_results_and_no_reason_to_stop(tmp_path: Path) -> None:
    nodes = {"what": "ok", "tag": 1, "resources": {"nodes": 2}}
    sweep, out = write_sweep(tmp_path, [{"what": "memory_error"}, nodes, OK]), tmp_path / "out"
    done = run("jobs.submit", sweep, "--debug", "--out", out)  # the run limits its memory for good
    assert done.returncode == 0, done.stdout
    assert sorted(record.status for record in records(out)) == ["ok", "oom", "unsupported"]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "by_command"), [(None, False), (1, True)])
def test_interrupted_is_recorded_as_cancelled_and_resumed(
    tmp_path: Path, ranks: int | None, by_command: bool
) -> None:
    """Ctrl-C and `jobs cancel`, which sends SIGTERM, have the same effect."""
    fifo = Fifo(tmp_path / "fifo")
    cases = [{"what": "wait", "path": str(fifo.path), "rank": 0}, OK]
    sweep = write_sweep(tmp_path, cases, launch={"nproc_per_node": ranks} if ranks else {})
    out = tmp_path / "out"
    process = start("jobs.submit", sweep, "--debug", "--out", out)
    waiting, child = fifo.pids()
    if by_command:
        assert "cancelled 1 job" in call("jobs", "cancel", out).stdout
    else:
        process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130 and "interrupted" in output
    assert statuses(out) == {"wait0": "cancelled", "ok0": "cancelled"}
    assert not list(out.glob(f"submissions/*/{HEARTBEAT}"))
    assert not alive(waiting)
    assert only_record(out, what="wait").status == "cancelled"
    if ranks:
        assert not alive(child)
        return
    os.kill(child, signal.SIGKILL)  # debug runs are not isolated, so it is still alive
    fifo.release()
    assert call("jobs.submit", sweep, "--debug", "--out", out).returncode == 0
    assert [record.status for record in records(out)] == ["cancelled", "ok", "ok"]
