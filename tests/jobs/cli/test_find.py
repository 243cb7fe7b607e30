"""Commands without a folder take the last accepted submission; commands with a run find it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from jobs.cli.completion import results_folders
from jobs.results.latest import LATEST, note_accepted
from jobs.results.record import Record
from tests.jobs.harness import ROOT, call, records, write_submission, write_sweep


@pytest.fixture(scope="module")
def submitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep and the results of its local submission, of which one run failed."""
    folder = tmp_path_factory.mktemp("submitted")
    sweep = write_sweep(folder, [{"what": "ok"}, {"what": "raises", "tag": 1}])
    assert call("jobs.submit", sweep, "--local", "--out", folder / "out").returncode == 1
    return folder


@pytest.fixture
def here(submitted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder. Its folder logs/ok and the folder elsewhere/out have a submission."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for the processes that commands start
    shutil.copy(submitted / "sweep.yaml", tmp_path)
    for out in ("elsewhere/out", "logs/ok"):
        shutil.copytree(submitted / "out", out)
        note_accepted(tmp_path / out)
    assert not Path("logs/.latest.json").exists()  # the file of the user, if this is his folder
    return tmp_path


def shown() -> str:
    """Return the folder that `status` shows, relative to the current folder."""
    folder = json.loads(call("jobs", "status", "--json").stdout)["folder"]
    return str(Path(folder).relative_to(Path.cwd()))


def failed_run(out: str) -> Record:
    return next(record for record in records(Path(out)) if record.status == "error")


@pytest.mark.slow
def test_the_last_accepted_submission_is_the_default(here: Path) -> None:
    """Neither a refused submission, nor a replay, nor a plan in another folder changes it."""
    write_submission(here / "sweep.yaml", Path("logs/refused"))  # its jobs were never accepted
    assert call("jobs.submit", "sweep.yaml", "--dry-run", "--out", "logs/plan").returncode == 0
    assert call("jobs", "replay", failed_run("logs/ok").run).returncode == 1
    assert Path("logs/replay").exists() and shown() == "logs/ok"
    assert f"cancelled 0 jobs of {here}/logs/ok" in call("jobs", "cancel").stdout

    for command in ("tables", "attempts", "compare"):  # compare: it has no blocks
        found = call("jobs", command)
        assert found.returncode == 2 * (command == "compare") and "logs/ok" in found.stdout

    LATEST.write_text("{")
    unknown = call("jobs", "cancel")
    assert unknown.returncode == 2 and "no submission was made here" in unknown.stdout

    call("jobs.submit", "sweep.yaml", "--local", "--out", "elsewhere/out")  # skips all runs
    assert shown() == "elsewhere/out"
    done = call("jobs", "retry")
    assert done.returncode == 1 and "elsewhere/out" in done.stdout
    assert len(records(here / "elsewhere/out")) == 3 and len(records(here / "logs/ok")) == 2
    Path("elsewhere").rename("gone")
    lost = call("jobs", "cancel")  # rather than the jobs of another folder
    assert lost.returncode == 2 and f"no folder {here}/elsewhere/out" in lost.stdout
    LATEST.unlink()

    failed = failed_run("logs/ok")  # and in logs/replay
    assert "/logs/ok/submissions/" in call("jobs", "logs", failed.run).stdout
    for out in ("ok", "refused"):
        Path("logs", out).rename(f"gone {out}")
    assert "-> error\n" in call("jobs", "logs", failed.run).stdout  # of logs/replay


def test_folders_in_folders_of_logs_are_found(here: Path) -> None:
    """`logs RUN` and the completion find logs/h/one. It is no default: it may be a reference."""
    LATEST.unlink()
    (here / "logs/h").mkdir()
    Path("logs/ok").rename("logs/h/one")
    Path("logs/notes.txt").touch()
    assert "no submission was made here" in call("jobs", "status").stdout
    failed = failed_run("logs/h/one")
    assert f"{here}/logs/h/one/submissions" in call("jobs", "logs", failed.run[:8]).stdout
    assert results_folders("logs/") == ["logs/h/one"]

    unreadable = Path("logs/h/two/submissions")
    unreadable.parent.mkdir()
    unreadable.touch()
    assert call("jobs", "logs", failed.run).returncode == 0


def test_replay_where_it_cannot_write_says_so(here: Path) -> None:
    failed = failed_run("elsewhere/out")
    Path("logs").rename("gone")
    Path("logs").touch()
    done = call("jobs", "replay", failed.run, "--in", "elsewhere/out")
    assert done.returncode == 2, done.stdout
    assert done.stdout == f"cannot write logs/replay/{failed.run}.yaml: Not a directory\n"


def test_a_broken_manifest_elsewhere_does_not_matter(here: Path) -> None:
    broken = Path("logs/broken/submissions/1")
    broken.mkdir(parents=True)
    (broken / "handles.json").write_text("{}")
    (broken / "manifest.json").write_text('{"runs": 1}')
    second = Path("logs/ok/submissions/2")
    second.mkdir()
    (second / "manifest.json").write_text("{")
    seen = call("jobs", "status")
    assert seen.returncode == 1 and "logs/ok: sweep misbehave, 2 runs, 1 submission" in seen.stdout
    assert f"{second.resolve()}/manifest.json: skipped: Invalid JSON" in seen.stdout
    assert "of the exception" in call("jobs", "logs", failed_run("logs/ok").run).stdout


@pytest.mark.slow
def test_logs_reads_only_the_folder_that_contains_the_run(here: Path) -> None:
    """The folder of the last submission comes first, and records elsewhere are not read."""
    failed = failed_run("logs/ok")
    for path in Path("elsewhere/out/records").iterdir():
        path.write_bytes(b"broken")
    done = call("jobs", "logs", failed.run[:8])
    assert done.returncode == 0 and f"{here}/logs/ok/submissions" in done.stdout
    call("jobs.submit", "sweep.yaml", "--local", "--out", "elsewhere/out", "--force")
    assert f"{here}/elsewhere/out/submissions" in call("jobs", "logs", failed.run).stdout

    other = write_sweep(here, [{"what": "ok", "tag": tag} for tag in range(40)], name="many")
    digits = [run[0] for run in write_submission(other, Path("logs/many")).runs]
    common = max(digits, key=digits.count)
    assert f"{common!r} is ambiguous: " in call("jobs", "logs", common).stdout
