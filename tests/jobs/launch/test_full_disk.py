"""Full disks: a sweep stops with the reason, and the same command continues it later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs.worker.environment import job_environment
from jobs.worker.scratch import undelivered
from tests.benchmarks.misbehave import fill
from tests.jobs.harness import (
    PATIENCE_S,
    ROOT,
    call,
    only_record,
    records,
    run,
    start,
    statuses,
    waiting_sweep,
    write_sweep,
)
from tests.jobs.small_disk import small_disk

WORDS = "cannot write results to {}: No space left on device; free space and repeat the command"


@pytest.mark.slow
def test_a_full_results_folder_stops_the_queue_and_the_command_resumes(tmp_path: Path) -> None:
    """One job fills the disk while another waits. No job starts after that."""
    _, fifo = waiting_sweep(tmp_path)
    with small_disk(tmp_path / "out", 512) as out:
        ballast = out / "ballast"
        ballast.touch()
        cases: list[dict[str, Any]] = [
            {"what": "wait", "path": str(fifo.path)},
            {"what": "ok"},
            {"what": "fill_disk", "path": str(ballast)},
            *({"what": "ok", "tag": tag} for tag in (1, 2, 3)),
        ]
        sweep = write_sweep(tmp_path, cases, runs_per_job=1)
        command = ("jobs.submit", sweep, "--local", "--parallel", "2", "--out", out)
        done = run(*command)  # a process of its own, since its end cannot be written
        assert done.returncode == 2
        assert done.stdout.splitlines()[-1] == WORDS.format(out)
        assert done.stdout.count("\n") <= 2  # one run was ok; no worker is reported as dead
        found = statuses(out)
        assert found.pop("ok0") == "ok" and set(found.values()) == {"killed"}
        assert WORDS.format(out) in call("jobs", "status", out).stdout
        logs = [path.read_text() for path in out.glob("submissions/*/jobs/*/*.log")]
        assert len(logs) == 4 - 1 + 3  # three workers, one log for each of their runs
        fifo.release()
        again = call(*command)  # the disk is still full
        assert again.returncode == 2 and again.stdout.splitlines()[-1] == WORDS.format(out)
        ballast.unlink()
        assert call(*command).returncode == 0
        assert sorted(r.params["tag"] for r in records(out)) == [0, 0, 0, 1, 2, 3]
        assert {r.status for r in records(out)} == {"ok"}
        assert set(statuses(out).values()) == {"ok"}
        assert "cannot write" not in call("jobs", "status", out).stdout
        assert not list(out.rglob(".*.json.*"))  # no partial files


@pytest.mark.slow
def test_a_full_disk_in_the_foreground(tmp_path: Path) -> None:
    with small_disk(tmp_path / "out", 512) as out:
        (out / "ballast").touch()
        case = {"what": "print_to_full_disk", "path": str(out / "ballast")}
        sweep = write_sweep(tmp_path, [case, {"what": "ok"}])
        done = run("jobs.submit", sweep, "--debug", "--out", out)
        assert done.returncode == 2 and done.stdout.splitlines()[-1] == WORDS.format(out)
        assert '"what":"print_to_full_disk"' in done.stdout  # the record is not lost
        assert not [line for line in done.stdout.splitlines() if line.startswith("ok ")]


@pytest.mark.slow
def test_a_log_on_a_full_disk_is_not_the_fault_of_the_run(tmp_path: Path) -> None:
    """The logs are on a disk of their own, so that the record can be written."""
    out = tmp_path / "out"
    out.mkdir()
    with small_disk(out / "submissions", 512) as disk:
        ballast = disk / "ballast"
        ballast.touch()
        case = {"what": "print_to_full_disk", "path": str(ballast)}
        sweep = write_sweep(tmp_path, [{"what": "ok"}, case, {"what": "ok", "tag": 1}])
        done = call("jobs.submit", sweep, "--local", "--out", out)
        assert done.returncode == 1 and "2 ok, 1 killed" in done.stdout
        found = [(r.params["what"], r.status) for r in records(out)]
        assert found == [("ok", "ok"), ("print_to_full_disk", "killed"), ("ok", "ok")]
        failure = records(out)[1].failure
        assert failure is not None and failure.message == "[Errno 28] No space left on device"
        ballast.unlink()
        again = call("jobs.submit", sweep, "--local", "--out", out)
        assert again.returncode == 0 and "skipping 2 runs with a result" in again.stdout
        assert [(r.params["what"], r.status) for r in records(out)[3:]] == [(case["what"], "ok")]
        assert set(statuses(out).values()) == {"ok"}


@pytest.mark.parametrize("pages", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_submission_onto_a_full_disk_says_so(tmp_path: Path, pages: int) -> None:
    """With two free pages, the lock and usually the manifest can be written."""
    sweep = write_sweep(tmp_path, [{"what": "ok"}])
    with small_disk(tmp_path / "out", 64) as out:
        fill(out / "ballast")
        os.truncate(out / "ballast", (out / "ballast").stat().st_size - 4096 * pages)
        done = call("jobs.submit", sweep, "--local", "--out", out)
        assert done.returncode == 2 and done.stdout == WORDS.format(out) + "\n"
        (out / "ballast").unlink()
        assert call("jobs.submit", sweep, "--local", "--out", out).returncode == 0
        assert [r.status for r in records(out)] == ["ok"]


def test_a_temporary_folder_and_a_log_on_the_same_full_disk(tmp_path: Path) -> None:
    """The process of the run still leaves the error for its worker."""
    with small_disk(tmp_path / "disk", 64) as disk:
        log = disk / "run.log"
        log.write_bytes(b"x" * 4096)  # a full page
        fill(disk / "ballast")
        code = "from pathlib import Path; from jobs.worker.scratch import leave_error\n"
        code += f"leave_error(Path({str(disk)!r}), OSError(28, 'full'))"
        command = [sys.executable, "-c", code]
        with log.open("ab") as file:
            done = subprocess.run(command, cwd=ROOT, stderr=file, env=job_environment())
        assert done.returncode == 0 and log.stat().st_size == 4096
        assert "No space left on device" in str(undelivered(disk))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [None, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_a_full_temporary_folder_is_named(tmp_path: Path, ranks: int | None) -> None:
    """The same command repeats the run, because a full disk is not its fault."""
    with small_disk(tmp_path / "tmp", 256) as temporary:
        (temporary / "ballast").touch()
        case = {"what": "fill_disk", "path": str(temporary / "ballast"), "rank": 0}
        launch = {"launch": {"nproc_per_node": ranks}} if ranks else {}
        sweep, out = write_sweep(tmp_path, [case], **launch), tmp_path / "out"
        command = ("jobs.submit", sweep, "--local", "--out", out)
        assert call(*command, environment={"TMPDIR": str(temporary)}).returncode == 1
        record = only_record(out)
        assert record.status == "killed" and record.failure is not None
        assert record.failure.message.startswith(f"cannot write its outcome to {temporary}/run-")
        assert ": No space left on device; set TMPDIR to " in record.failure.message
        assert [path.name for path in temporary.iterdir()] == ["ballast"]
        (temporary / "ballast").unlink()
        assert call(*command, environment={"TMPDIR": str(temporary)}).returncode == 0
        assert [r.status for r in records(out)] == ["killed", "ok"]


@pytest.mark.slow
def test_a_temporary_folder_that_disappears_costs_no_worker(tmp_path: Path) -> None:
    sweep, fifo = waiting_sweep(tmp_path)
    out, temporary = tmp_path / "out", tmp_path / "tmp"
    temporary.mkdir()
    command = ("jobs.submit", sweep, "--local", "--out", out)
    queue = start(*command, environment={"TMPDIR": str(temporary)})
    waiting, _ = fifo.pids()
    temporary.rename(tmp_path / "elsewhere")
    os.kill(waiting, signal.SIGKILL)
    output, _ = queue.communicate(timeout=PATIENCE_S)
    assert queue.returncode == 1 and "ended with exit code" not in output
    last = only_record(out, what="ok", tag=1)
    assert last.status == "killed" and last.failure is not None
    assert "cannot create a temporary folder: [Errno 2] No such file" in last.failure.message
    assert "; set TMPDIR to a folder with free space" in last.failure.message
    fifo.release()
    assert call(*command).returncode == 0
    assert set(statuses(out).values()) == {"ok"}
