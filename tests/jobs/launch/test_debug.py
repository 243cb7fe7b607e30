"""`--debug` executes runs in the foreground and stops at the first failure."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from jobs.results.heartbeat import HEARTBEAT
from jobs.results.manifest import Executor
from jobs.worker.worker import Worker
from tests.jobs.harness import (
    PATIENCE_S,
    Fifo,
    alive,
    call,
    facts,
    only_record,
    records,
    run,
    start,
    statuses,
    write_submission,
    write_sweep,
)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [None, 2])
def test_stops_at_the_first_failure_and_shows_its_traceback(
    tmp_path: Path, ranks: int | None
) -> None:
    cases: list[dict[str, Any]] = [
        {"what": "ok"},
        {"what": "raises", "rank": 1},
        {"what": "ok", "tag": 1},
    ]
    sweep = write_sweep(tmp_path, cases, launch={"nproc_per_node": ranks} if ranks else {})
    out = tmp_path / "out"
    # The input is empty, so a debugger or a prompt would fail.
    process = start(
        "jobs.submit", sweep, "--debug", "--out", out, environment={"RANK": "5", "WORLD_SIZE": "9"}
    )
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert 'misbehave.py", line' in output and "in raises\n" in output
    assert "ValueError: the message [/red] of the exception" in output
    assert "stopped at the first failure" in output
    assert "(Pdb)" not in output and "bdb." not in output
    assert [record.status for record in records(out)] == ["ok", "error"]
    first, second = records(out)
    assert (facts(first)["pid"] == process.pid) is (ranks is None)
    assert second.failure is not None and second.failure.rank == (1 if ranks else None)
    if ranks:
        assert facts(first)["environment"]["WORLD_SIZE"] == "2"


def test_the_environment_of_who_debugs_stays_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    surrounding = {"RANK": "5", "SLURM_JOB_ID": "17", "CUDA_VISIBLE_DEVICES": "3"}
    for name, value in surrounding.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RUN_ARTIFACTS", raising=False)
    manifest = write_submission(
        write_sweep(tmp_path, [{"what": "ok"}]), tmp_path / "out", Executor.debug
    )
    before = dict(os.environ)
    Worker(manifest, 0, in_process=True).run()
    (record,) = records(tmp_path / "out")
    assert "RANK" not in facts(record)["environment"]
    assert "SLURM_JOB_ID" not in facts(record)["environment"]
    assert dict(os.environ) == before


def test_out_of_memory_is_a_result_and_no_reason_to_stop(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, [{"what": "memory_error"}, {"what": "ok"}])
    out = tmp_path / "out"
    done = run("jobs.submit", sweep, "--debug", "--out", out)  # the run limits its memory for good
    assert done.returncode == 0, done.stdout
    assert [record.status for record in records(out)] == ["oom", "ok"]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "by_command"), [(None, False), (1, True)])
def test_interrupted_is_recorded_as_cancelled_and_resumed(
    tmp_path: Path, ranks: int | None, by_command: bool
) -> None:
    """Ctrl-C and `jobs cancel`, which sends SIGTERM, have the same effect."""
    fifo = Fifo(tmp_path / "fifo")
    cases: list[dict[str, Any]] = [
        {"what": "wait", "path": str(fifo.path), "rank": 0},
        {"what": "ok"},
    ]
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


def test_a_shape_that_this_machine_lacks_is_unsupported_and_no_failure(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, [{"what": "ok"}], resources={"nodes": 2, "gpus_per_node": 0})
    done = call("jobs.submit", sweep, "--debug", "--out", tmp_path / "out")
    assert done.returncode == 0
    assert only_record(tmp_path / "out").status == "unsupported"
