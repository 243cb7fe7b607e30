"""Queues and workers that are stopped from outside, and submissions that resume after them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.harness import (
    PATIENCE_S,
    ROOT,
    Fifo,
    alive,
    await_true,
    call,
    facts,
    only_record,
    parent_of,
    records,
    start,
    start_python,
    statuses,
    waiting_sweep,
    write_submission,
    write_sweep,
)

# Stops at the warning signal as jobs.launch.worker_task does, without Slurm.
WARNED = """
import signal, sys
from pathlib import Path
from jobs.results.manifest import read_manifest
from jobs.worker.worker import Worker

worker = Worker(read_manifest(Path(sys.argv[1])), 0)

def on_warning(*_):
    worker.stop(sys.argv[2])
    sys.exit(7)

signal.signal(signal.SIGUSR2, on_warning)
worker.run()
"""


@pytest.mark.slow
def test_preempted_then_over_the_limit_then_done(tmp_path: Path) -> None:
    sweep, fifo = waiting_sweep(tmp_path)
    manifest = write_submission(sweep, tmp_path / "out")
    for reason in ("preempted", "limit"):
        worker = start_python("-c", WARNED, manifest.path, reason)
        waiting, child = fifo.pids()
        server = parent_of(waiting)
        for pid in (waiting, server, worker.pid):  # as Slurm does if it tracks the process tree
            os.kill(pid, signal.SIGUSR2)
        assert worker.wait(PATIENCE_S) == 7
        await_true(lambda pid=server: not alive(pid), "the fork server ended")
        assert not alive(waiting) and not alive(child)
    assert start_python("-c", WARNED, manifest.path, "").wait(PATIENCE_S) == 0
    found = [(r.params["what"], r.params["tag"], r.status) for r in records(manifest.folder)]
    assert found == [
        ("ok", 0, "ok"),
        ("wait", 0, "preempted"),
        ("wait", 0, "timeout"),  # first run of its allocation: it can never finish
        ("ok", 1, "ok"),
    ]


@pytest.mark.slow
def test_stopped_in_every_way_and_resumed_each_time_without_repeating(tmp_path: Path) -> None:
    sweep, fifo = waiting_sweep(tmp_path)
    out, temporary = tmp_path / "out", tmp_path / "tmp"
    temporary.mkdir()

    command: list[str | Path] = ["jobs.submit", sweep, "--local", "--out", out]

    def started() -> tuple[int, list[int]]:
        """Return the pids of the worker, and of what it has started."""
        waiting, child = fifo.pids()
        server = parent_of(waiting)
        return parent_of(server), [server, waiting, child]

    def waiting_queue() -> tuple[subprocess.Popen[str], int, list[int]]:
        return start(*command, environment={"TMPDIR": str(temporary)}), *started()

    for number in (signal.SIGINT, signal.SIGTERM):
        queue, _, pids = waiting_queue()
        assert statuses(out) == {"ok0": "ok", "wait0": "running", "ok1": "queued"}
        queue.send_signal(number)
        output, _ = queue.communicate(timeout=PATIENCE_S)
        assert queue.returncode == 130 and "repeat the command to continue" in output
        assert not any(map(alive, pids))
        assert [r.status for r in records(out)][-1] == "cancelled"

    terminal, theirs = os.openpty()
    own = ["setsid", "--ctty", sys.executable, "-m", *command]
    on_terminal = subprocess.Popen(own, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    _, pids = started()
    os.close(terminal)  # hangs up
    assert on_terminal.wait(PATIENCE_S) == 130
    assert not any(map(alive, pids))
    assert statuses(out) == {"ok0": "ok", "wait0": "cancelled", "ok1": "cancelled"}

    queue, worker, pids = waiting_queue()
    queue.kill()
    queue.communicate()
    await_true(lambda: not any(map(alive, [worker, *pids])), "the worker ended with its queue")
    assert [r.status for r in records(out)] == ["ok", *["cancelled"] * 4]

    queue, worker, pids = waiting_queue()
    os.kill(worker, signal.SIGKILL)
    again, child = fifo.pids()  # in the next worker of the queue
    assert parent_of(parent_of(again)) != worker
    await_true(lambda: not any(map(alive, pids)), "what the worker had started ended")
    assert len(records(out)) == 5  # a dead worker writes nothing
    queue.kill()
    output, _ = queue.communicate()
    assert f"(process {worker}) of job 0 was killed by SIGKILL; starting it again" in output
    await_true(lambda: not alive(child), "the run ended with its queue")
    await_true(lambda: not list(temporary.iterdir()), "the scratch folders were removed")
    assert statuses(out)["ok0"] == "ok" and statuses(out)["ok1"] == "killed"

    fifo.release()
    assert call(*command).returncode == 0
    found = [(r.params["what"], r.params["tag"], r.attempt, r.status) for r in records(out)]
    assert found == [
        ("ok", 0, 1, "ok"),
        *(("wait", 0, attempt, "cancelled") for attempt in (1, 2, 3, 4, 6)),  # 5: a dead worker
        ("wait", 0, 7, "ok"),
        ("ok", 1, 1, "ok"),
    ]
    assert set(statuses(out).values()) == {"ok"}


@pytest.mark.slow
def test_a_second_worker_of_a_job_replaces_the_first(tmp_path: Path) -> None:
    """Slurm starts a job again if its node is lost, but the old worker may still run."""
    sweep, fifo = waiting_sweep(tmp_path, "pause")
    manifest = write_submission(sweep, tmp_path / "out")
    workers = []
    for _ in range(2):
        workers.append(start("jobs.worker", manifest.path, "0"))
        run, _ = fifo.pids()
        assert parent_of(parent_of(run)) == workers[-1].pid
    fifo.release()
    assert [worker.wait(PATIENCE_S) for worker in workers] == [1, 0]
    found = [(r.params["what"], r.attempt, r.status) for r in records(manifest.folder)]
    assert found == [("ok", 1, "ok"), ("pause", 2, "ok"), ("ok", 1, "ok")]


@pytest.mark.slow
def test_a_folder_that_is_moved_meanwhile(tmp_path: Path) -> None:
    """Nothing is written to the old place, which would look like a results folder."""
    sweep, fifo = waiting_sweep(tmp_path, "pause")
    out = tmp_path / "out"
    queue = start("jobs.submit", sweep, "--local", "--out", out)
    fifo.pids()
    out.rename(tmp_path / "elsewhere")
    fifo.release()
    output, _ = queue.communicate(timeout=PATIENCE_S)
    assert queue.returncode == 2 and f"{out} was moved or removed" in output, output
    assert not out.exists()
    assert [r.status for r in records(tmp_path / "elsewhere")] == ["ok"]


@pytest.mark.slow
def test_a_run_that_takes_its_worker_down_twice_is_left_alone(tmp_path: Path) -> None:
    """The other runs of its job are executed. All is shown while the queue goes on."""
    fifo = Fifo(tmp_path / "fifo")
    cases: list[dict[str, Any]] = [
        {"what": "ok"},
        {"what": "kill_worker", "artifact": "trace"},
        {"what": "ok", "tag": 1},
        {"what": "wait", "path": str(fifo.path)},
    ]
    sweep, out = write_sweep(tmp_path, cases, runs_per_job=3), tmp_path / "out"
    queue = start("jobs.submit", sweep, "--local", "--out", out)
    fifo.pids()
    shown = {"ok0": "ok", "kill_worker0": "killed", "ok1": "ok", "wait0": "running"}
    assert statuses(out) == shown
    record = only_record(out, what="kill_worker")
    assert record.failure.type == "WorkerDied"
    assert "died 2 times" in record.failure.message
    # Artifacts of a dead worker are not attributed to the next attempt, but `logs` lists them.
    assert record.artifacts is None
    logs = call("jobs", "logs", record.run, "--in", out).stdout
    for attempt in (1, 2):
        assert f"artifacts/{record.run}-0-{attempt}\n" in logs
    assert "cancelled 1 job " in call("jobs", "cancel", out).stdout
    queue.communicate(timeout=PATIENCE_S)
    assert queue.returncode == 130


@pytest.mark.slow
def test_a_fork_server_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    """Its worker ends a child of the run in a session of its own, and starts another server."""
    sweep, fifo = waiting_sweep(tmp_path)
    out, temporary = tmp_path / "out", tmp_path / "tmp"
    temporary.mkdir()
    environment = {"TMPDIR": str(temporary)}
    queue = start("jobs.submit", sweep, "--local", "--out", out, environment=environment)
    waiting, child = fifo.pids()
    worker = parent_of(parent_of(waiting))
    os.kill(worker, signal.SIGSTOP)  # it notices only when the child has lost its parents
    os.kill(parent_of(waiting), signal.SIGKILL)
    await_true(lambda: not alive(waiting), "the run ended with the fork server")
    assert alive(child)
    os.kill(worker, signal.SIGCONT)
    await_true(lambda: len(records(out)) >= 2, "the run was recorded")
    assert not alive(waiting) and not alive(child)  # before the record was written
    queue.communicate(timeout=PATIENCE_S)
    found = records(out)
    assert [r.status for r in found] == ["ok", "killed", "ok"]
    assert found[1].failure.type == "ServerDied"
    assert facts(found[0])["worker"] == facts(found[2])["worker"] == worker
    assert facts(found[0])["server"] != facts(found[2])["server"]
    assert not list(temporary.iterdir())


@pytest.mark.slow
def test_under_nohup_the_queue_goes_on(tmp_path: Path) -> None:
    sweep, fifo = waiting_sweep(tmp_path)
    out = tmp_path / "out"
    command = ["nohup", sys.executable, "-m", "jobs.submit", sweep, "--local", "--out", out]
    null = subprocess.DEVNULL
    queue = subprocess.Popen(command, cwd=ROOT, stdout=null, stderr=null)
    waiting, _ = fifo.pids()
    queue.send_signal(signal.SIGHUP)
    os.kill(waiting, signal.SIGKILL)
    assert queue.wait(PATIENCE_S) == 1
    assert [r.status for r in records(out)] == ["ok", "killed", "ok"]
