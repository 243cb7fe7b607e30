"""Local and debug submissions, seen from a host on which their processes are not visible."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.processes import start_ticks
from jobs.results.heartbeat import HEARTBEAT, runs_here
from jobs.results.manifest import Manifest, write_manifest
from tests.jobs.harness import (
    PATIENCE_S,
    await_true,
    call,
    grow_old,
    statuses,
    write_submission,
    write_sweep,
)


@pytest.fixture
def submission(tmp_path: Path) -> Manifest:
    return write_submission(write_sweep(tmp_path, [{"what": "ok"}]), tmp_path / "out")


def test_the_heartbeat_goes_on_until_the_end(
    submission: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.results.heartbeat.BEAT_S", 0.01)
    heartbeat = submission.path / HEARTBEAT
    with pytest.raises(KeyboardInterrupt), runs_here(submission):
        await_true(heartbeat.exists, "the first beat")
        for _ in range(2):
            grow_old(heartbeat, 300)
            await_true(lambda: time.time() - heartbeat.stat().st_mtime < 200, "another beat")
        assert statuses(submission.folder) == {"ok0": "queued"}
        raise KeyboardInterrupt
    assert not heartbeat.exists()
    assert statuses(submission.folder) == {"ok0": "cancelled"}


def belongs_to(submission: Manifest, pid: int, host: str, **more: str) -> None:
    """Make a submission one that a process of a host executes."""
    handle = {"pid": pid, "started": start_ticks(pid), "host": host, "interrupted": False, **more}
    (submission.path / "handles.json").write_text(json.dumps({"0": handle}))


ELSEWHERE = {"pid": 1, "host": "elsewhere"}
# Here, another process has its pid, or none.
CONTAINER = {"pid": 2**22 + 1, "host": os.uname().nodename, "pids": "of a container"}


@pytest.mark.parametrize(
    ("process", "beats", "age_s", "state"),
    [
        (ELSEWHERE, True, 60, "queued"),
        (ELSEWHERE, True, 300, "killed"),
        (ELSEWHERE, False, 60, "queued"),  # it has just started
        (ELSEWHERE, False, 300, "killed"),
        (CONTAINER, True, 60, "queued"),
        ({"pid": os.getpid(), "host": os.uname().nodename}, False, 300, "queued"),
    ],
)
def test_a_queue_is_in_flight_while_it_is_alive_or_its_heartbeat_is_young(
    submission: Manifest, process: dict[str, Any], beats: bool, age_s: float, state: str
) -> None:
    """No other queue runs beside it: two would disturb each other's timings."""
    write_manifest(replace(submission, created_at=time.time() - age_s))
    belongs_to(submission, **process)
    if beats:
        (submission.path / HEARTBEAT).touch()
        grow_old(submission.path / HEARTBEAT, age_s)
    out = submission.folder
    assert statuses(out) == {"ok0": state}
    submit = ("jobs.submit", out.parent / "sweep.yaml", "--out", out)
    plan = call(*submit, "--dry-run").stdout
    assert ("1 queued or running" in plan) == (state == "queued"), plan
    if process is ELSEWHERE:
        assert " on elsewhere " in call("jobs", "status", out, "--json").stdout
    if state == "killed":
        return
    for executor in ("--local", "--debug"):
        told = call(*submit, executor)
        in_use = f"{out} is in use by process {process['pid']} on {process['host']}: "
        assert told.returncode == 2 and in_use in told.stdout and "--force" in told.stdout
    assert call(*submit, "--debug", "--force").returncode == 0


def test_cancel_goes_on_after_a_submission_that_it_cannot_cancel(
    submission: Manifest, tmp_path: Path
) -> None:
    second = write_submission(tmp_path / "sweep.yaml", submission.folder)
    sleeper = subprocess.Popen(["sleep", "100"])
    belongs_to(submission, 1, "elsewhere")
    belongs_to(second, sleeper.pid, os.uname().nodename)
    done = call("jobs", "cancel", submission.folder)
    assert done.returncode == 2 and "cancelled 1 job" in done.stdout
    assert f"submission {submission.id} runs on host elsewhere" in done.stdout
    assert sleeper.wait(PATIENCE_S) == -signal.SIGTERM
