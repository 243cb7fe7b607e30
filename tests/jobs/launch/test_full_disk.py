"""Full disks: a sweep stops with the reason, and the same command continues it later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.jobs.harness import Fifo, call, only_record, records, run, statuses, write_sweep
from tests.jobs.small_disk import small_disk

WORDS = "cannot write results to {}: No space left on device; free space and repeat the command"


@pytest.mark.slow
def test_a_full_results_folder_stops_the_queue_and_the_command_resumes(tmp_path: Path) -> None:
    """One job fills the disk while another waits. No job starts after that."""
    fifo = Fifo(tmp_path / "fifo")
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
        assert done.returncode == 2 and done.stdout.splitlines()[-1] == WORDS.format(out)
        found = statuses(out)
        assert found.pop("ok0") == "ok" and set(found.values()) == {"killed"}
        assert WORDS.format(out) in call("jobs", "status", out).stdout
        assert len(list(out.glob("submissions/*/jobs/*/worker.log"))) == 3
        fifo.release()
        again = call(*command)  # the disk is still full
        assert again.returncode == 2 and WORDS.format(out) in again.stdout
        ballast.unlink()
        assert call(*command).returncode == 0
        assert sorted(r.params["tag"] for r in records(out)) == [0, 0, 0, 1, 2, 3]
        assert {r.status for r in records(out)} == {"ok"}
        assert set(statuses(out).values()) == {"ok"}
        assert not list(out.rglob(".*.json.*"))  # no partial files


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
        done = run("jobs.submit", sweep, "--local", "--out", out)  # its end cannot be written
        assert done.returncode == 1 and "2 ok, 1 killed" in done.stdout
        found = [(r.params["what"], r.status) for r in records(out)]
        assert found == [("ok", "ok"), ("print_to_full_disk", "killed"), ("ok", "ok")]
        assert records(out)[1].failure.message == "[Errno 28] No space left on device"
        ballast.unlink()
        again = call("jobs.submit", sweep, "--local", "--out", out)
        assert again.returncode == 0 and "skipping 2 runs with a result" in again.stdout
        assert [(r.params["what"], r.status) for r in records(out)[3:]] == [(case["what"], "ok")]
        assert set(statuses(out).values()) == {"ok"}


@pytest.mark.slow
def test_a_full_temporary_folder_is_named(tmp_path: Path) -> None:
    """The same command repeats the run, because a full disk is not its fault."""
    with small_disk(tmp_path / "tmp", 256) as temporary:
        (temporary / "ballast").touch()
        case = {"what": "fill_disk", "path": str(temporary / "ballast"), "rank": 0}
        sweep, out = write_sweep(tmp_path, [case]), tmp_path / "out"
        command = ("jobs.submit", sweep, "--local", "--out", out)
        assert call(*command, environment={"TMPDIR": str(temporary)}).returncode == 1
        record = only_record(out)
        assert record.status == "killed"
        assert record.failure.message.startswith(f"cannot write its outcome to {temporary}/run-")
        assert ": No space left on device; set TMPDIR to " in record.failure.message
        assert [path.name for path in temporary.iterdir()] == ["ballast"]
        (temporary / "ballast").unlink()
        assert call(*command, environment={"TMPDIR": str(temporary)}).returncode == 0
        assert [r.status for r in records(out)] == ["killed", "ok"]
