"""Results of older code in the state of a results folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.cli.status import status
from tests.jobs.results_folder import TOY, ResultsFolder, load, ok


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A results folder with four runs: of older code, without a hash, of this code, missing."""

    def outcome(params: dict[str, Any], repeat: int) -> dict[str, Any] | None:
        own: dict[int, dict[str, Any]] = {
            1: {"source_hash": "0" * 16},
            2: {"source_hash": None},
            3: {},
        }
        return ok(1.0) | own[params["size"]] if params["size"] in own else None

    loaded = load(tmp_path, TOY + "grid: {size: [1, 2, 3, 4]}\n")
    ResultsFolder(tmp_path / "out").submit(loaded, outcome)
    return tmp_path / "out"


def test_status_tells_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        status(folder, where="status == ok")
    shown = capsys.readouterr().out
    assert "note: 2 of 3 results are from older code (1 without a source hash);" in shown
    assert [("older code" in line) for line in shown.splitlines() if "size=" in line] == [
        True, True, False,
    ]  # fmt: skip
    for condition, sizes in (("older_code == true", [1, 2]), ("older_code == false", [3, 4])):
        with pytest.raises(SystemExit):
            status(folder, as_json=True, where=condition)
        listed = json.loads(capsys.readouterr().out)["tasks"]
        assert [task["params"]["size"] for task in listed] == sizes
    with pytest.raises(SystemExit):
        status(folder, where="older_code == 1")
    assert "older_code: got 1, expected true or false" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        status(folder, as_json=True)
    assert sum(task["stale"] for task in json.loads(capsys.readouterr().out)["tasks"]) == 2
