"""Files that runs write (artifacts): their folders, and how `jobs logs` and records refer to them.

test_stop.py tests the files of a run whose worker died.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from systems.benchmark import artifacts_folder
from tests.jobs.harness import ROOT, artifacts_of, call, only_record, records, write_sweep

LEFT = {"trace": "a trace"}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results folder with runs that write a file and are ok or killed, and runs without files."""
    folder = tmp_path_factory.mktemp("artifacts")
    cases: list[dict[str, Any]] = [
        {"what": "ok", "artifact": "trace"},
        {"what": "sigkill", "artifact": "trace"},
        {"what": "ok", "tag": 1},
    ]
    sweep = write_sweep(folder, cases, repeats=2)
    surrounding = {"RUN_ARTIFACTS": str(folder / "of another run")}
    call("jobs.submit", sweep, "--local", "--out", folder / "out", environment=surrounding)
    return folder / "out"


def test_each_attempt_has_a_folder_of_its_own_whatever_its_status(out: Path) -> None:
    leaving = [record for record in records(out) if record.params["artifact"]]
    assert sorted(record.status for record in leaving) == ["killed", "killed", "ok", "ok"]
    for record in leaving:
        assert record.artifacts == f"artifacts/{record.run}-{record.repeat}-{record.attempt}"
        assert artifacts_of(out, record) == LEFT


def test_a_run_that_leaves_nothing_has_no_folder(out: Path) -> None:
    silent = [record for record in records(out) if record.params["tag"] == 1]
    assert [record.artifacts for record in silent] == [None, None]
    recorded = {record.artifacts for record in records(out) if record.artifacts}
    assert {f"artifacts/{path.name}" for path in (out / "artifacts").iterdir()} == recorded


def test_logs_says_where_they_are(out: Path) -> None:
    killed = next(record for record in records(out) if record.status == "killed")
    silent = next(record for record in records(out) if record.params["tag"] == 1)
    logs = call("jobs", "logs", killed.run, "--in", out).stdout
    folder = out / "artifacts" / f"{killed.run}-"
    assert f"# artifacts in {folder}" in logs
    assert "left files" not in call("jobs", "logs", silent.run, "--in", out).stdout


@pytest.mark.slow
def test_a_debug_run_and_its_replay_leave_files_too(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path, [{"what": "raises", "artifact": "trace"}])
    here = tmp_path / "out"
    assert call("jobs.submit", sweep, "--debug", "--out", here).returncode == 1
    first = only_record(here)
    assert artifacts_of(here, first) == LEFT
    assert call("jobs", "replay", first.run, "--in", here).returncode == 1
    replays = ROOT / "logs" / "replay"
    again = [record for record in records(replays) if record.run == first.run][-1]
    assert artifacts_of(replays, again) == LEFT


def test_without_the_launcher_they_go_to_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RUN_ARTIFACTS", raising=False)
    monkeypatch.chdir(tmp_path)
    assert artifacts_folder().resolve() == tmp_path / "artifacts"
    assert (tmp_path / "artifacts").is_dir()
