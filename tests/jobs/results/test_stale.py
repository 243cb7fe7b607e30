"""Results of older code in the state of a results folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.jobs.harness import call
from tests.jobs.results_folder import TOY, ResultsFolder, load, ok


def test_status_tells_them(tmp_path: Path, folder: ResultsFolder) -> None:
    """Of four runs, one is of older code, one without a hash, one of this code, one missing."""
    hashes: dict[int, dict[str, Any]] = {
        1: {"source_hash": "0" * 16},
        2: {"source_hash": None},
        3: {},
    }

    def outcome(params: dict[str, Any], repeat: int) -> dict[str, Any] | None:
        return ok(1.0) | hashes[params["size"]] if params["size"] in hashes else None

    folder.submit(load(tmp_path, TOY + "grid: {size: [1, 2, 3, 4]}\n"), outcome)

    def status(*options: str) -> str:
        return call("jobs", "status", folder.path, *options).stdout

    shown = status("--where", "status == ok")
    assert "note: 2 of 3 results are from older code (1 without a source hash);" in shown
    marked = [("older code" in line) for line in shown.splitlines() if "size=" in line]
    assert marked == [True, True, False]
    for condition, sizes in (("older_code == true", [1, 2]), ("older_code == false", [3, 4])):
        listed = json.loads(status("--json", "--where", condition))["tasks"]
        assert [task["params"]["size"] for task in listed] == sizes
    wrong = status("--where", "older_code == 1")
    assert "older_code: got 1, expected true or false" in wrong
    assert sum(task["stale"] for task in json.loads(status("--json"))["tasks"]) == 2
