"""Files that runs write (artifacts): their folders, and how `jobs logs` and records refer to them.

test_stop.py tests the files of a run whose worker died, test_debug.py those of debug runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from systems.benchmark import artifacts_folder
from tests.jobs.harness import artifacts_of, call, records, write_sweep


def test_each_attempt_that_leaves_files_has_a_folder_of_its_own(tmp_path: Path) -> None:
    cases: list[dict[str, Any]] = [
        {"what": "ok", "artifact": "trace"},
        {"what": "sigkill", "artifact": "trace"},
        {"what": "ok", "tag": 1},
    ]
    sweep, out = write_sweep(tmp_path, cases, repeats=2), tmp_path / "out"
    surrounding = {"RUN_ARTIFACTS": str(tmp_path / "of another run")}
    call("jobs.submit", sweep, "--local", "--out", out, environment=surrounding)
    leaving = [record for record in records(out) if record.artifacts]
    assert sorted(record.status for record in leaving) == ["killed", "killed", "ok", "ok"]
    for record in leaving:
        assert record.artifacts == f"artifacts/{record.run}-{record.repeat}-{record.attempt}"
        assert artifacts_of(out, record) == {"trace": "a trace"}
        logs = call("jobs", "logs", record.run, "--in", out).stdout
        assert f"# artifacts in {out}/artifacts/{record.run}-" in logs
    assert len(list((out / "artifacts").iterdir())) == 4


def test_without_the_launcher_they_go_to_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RUN_ARTIFACTS", raising=False)
    monkeypatch.chdir(tmp_path)
    assert artifacts_folder().resolve() == tmp_path / "artifacts"
    assert (tmp_path / "artifacts").is_dir()
