"""Local and debug submissions, seen from a host on which their processes are not visible."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobs.launch.lock import QueueLock
from jobs.processes import start_ticks
from jobs.results.heartbeat import HEARTBEAT, runs_here
from jobs.results.manifest import Manifest
from tests.jobs.harness import (
    PATIENCE_S,
    ROOT,
    alive,
    await_true,
    call,
    grow_old,
    parent_of,
    start,
    statuses,
    waiting_sweep,
    write_submission,
    write_sweep,
)

UNSHARE = ["unshare", *([] if os.getuid() == 0 else ["--map-root-user"]), "--uts", "sh", "-c"]


def elsewhere(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `python -m ARGUMENTS` under the host name `elsewhere`."""
    command = [*UNSHARE, 'hostname elsewhere && exec "$@"', "sh", sys.executable, "-m", *arguments]
    return subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def statuses_elsewhere(out: Path) -> dict[str, tuple[str, str]]:
    """Return the state and the detail of each run, seen from another host."""
    tasks = json.loads(elsewhere("jobs", "status", out, "--json").stdout)["tasks"]
    return {f"{t['params']['what']}{t['params']['tag']}": (t["state"], t["detail"]) for t in tasks}


@pytest.mark.slow
def test_a_queue_on_another_host_is_in_flight_until_its_heartbeat_stops(tmp_path: Path) -> None:
    if subprocess.run([*UNSHARE, "hostname elsewhere"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("this machine does not allow another host name (unshare --uts)")
    here = os.uname().nodename
    sweep, fifo = waiting_sweep(tmp_path)
    out = tmp_path / "out"
    queue = start("jobs.submit", sweep, "--local", "--out", out)
    waiting, _ = fifo.pids()
    worker = parent_of(parent_of(waiting))
    seen = statuses_elsewhere(out)
    assert seen["wait0"] == ("running", f"running on {here} in process {queue.pid}")
    assert (seen["ok0"][0], seen["ok1"][0]) == ("ok", "queued")

    cancel = elsewhere("jobs", "cancel", out)
    assert cancel.returncode == 2 and f"runs on host {here}; run this" in cancel.stdout
    plan = elsewhere("jobs.submit", sweep, "--out", out, "--dry-run").stdout
    assert "2 queued or running" in plan

    queue.kill()
    queue.communicate()
    await_true(lambda: not alive(worker), "the worker ended with its queue")
    assert statuses(out)["ok1"] == "killed"  # seen at once on this host
    assert statuses_elsewhere(out)["ok1"][0] == "queued"
    (heartbeat,) = out.glob(f"submissions/*/{HEARTBEAT}")
    grow_old(heartbeat, 300)
    state, why = statuses_elsewhere(out)["ok1"]
    assert state == "killed" and "has not reported for 5 min" in why
    fifo.release()
    grow_old(out / QueueLock.NAME, 300)
    again = elsewhere("jobs.submit", sweep, "--local", "--out", out)
    assert again.returncode == 0 and set(statuses(out).values()) == {"ok"}, again.stdout


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


def belongs_to(submission: Manifest, pid: int, host: str) -> None:
    """Make a submission one that a process of a host executes."""
    handle = {"pid": pid, "started": start_ticks(pid), "host": host, "interrupted": False}
    (submission.path / "handles.json").write_text(json.dumps({"0": handle}))


@pytest.mark.parametrize(("age_s", "state"), [(0, "queued"), (86400 * 2, "killed")])
def test_an_old_version_on_another_host_writes_no_heartbeat(
    submission: Manifest, age_s: float, state: str
) -> None:
    """Whether its queue still runs is unknown. After a day, this no longer blocks a new one."""
    path = submission.path / "manifest.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps(data | {"created_at": time.time() - age_s}))
    belongs_to(submission, 1, "elsewhere")
    assert statuses(submission.folder) == {"ok0": state}
    assert "on elsewhere" in call("jobs", "status", submission.folder, "--json").stdout


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
