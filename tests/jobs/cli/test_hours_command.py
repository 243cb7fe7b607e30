"""The command `python -m jobs hours`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.jobs.harness import call, records, write_sweep
from tests.jobs.results_folder import GRID, TOY, ResultsFolder, failed, load, ok


@pytest.mark.slow
def test_hours_of_a_real_submission(tmp_path: Path) -> None:
    cases = [{"what": "ok"}, {"what": "raise"}]
    sweep, out = write_sweep(tmp_path, cases), tmp_path / "out"
    assert call("jobs.submit", sweep, "--local", "--out", out).returncode == 1
    shown = json.loads(call("jobs", "hours", out, "--json").stdout)
    (row,) = shown["rows"]
    found = records(out)
    took = sum(r.finished_at - r.started_at for r in found) / 3600
    assert (row["runs"], row["attempts"], row["total_gpu_hours"]) == (2, 2, None)
    assert row["wall_hours"] == pytest.approx(took)
    waited = {r.job: r.seconds.waiting for r in found}
    assert row["queued_hours"] == pytest.approx(sum(w or 0 for w in waited.values()) / 3600)


def test_formats(tmp_path: Path) -> None:
    """Each of the 144 attempts in a folder took half a second on one GPU. Half of them failed."""
    keys = "resources: {gpus_per_node: 1}\nrepeats: 72\n"
    text = TOY + "grid: {size: [1, 2]}\n" + keys
    for name in ("one", "two"):
        ResultsFolder(tmp_path / name).submit(
            text, lambda params, _: ok(1.0) if params["size"] == 1 else failed("error")
        )
    folders = tmp_path / "one", tmp_path / "two"
    markdown = call("jobs", "hours", *folders).stdout.splitlines()
    assert "| wall (h) | starting (GPU-h) |" in " ".join(markdown[0].split()), markdown[0]
    assert [[c.strip() for c in line.split("|")[5:-1]] for line in markdown[2:]] == [
        ["0.000", "0.020", "0.000", "0.000", "0.000", "0.010", "0.010", "0.020"],
        ["0.000", "0.020", "0.000", "0.000", "0.000", "0.010", "0.010", "0.020"],
        ["0.000", "0.040", "0.000", "0.000", "0.000", "0.020", "0.020", "0.040"],
    ]


def test_default_is_all_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    nothing = call("jobs", "hours")
    assert nothing.returncode == 2 and "pass a folder as an argument" in nothing.stderr
    for name in ("a", "h200/b"):
        folder = ResultsFolder(tmp_path / "logs" / name)
        folder.submit(load(tmp_path, TOY + GRID), ok(1.0))
    (tmp_path / "logs" / "cut" / "submissions").mkdir(parents=True)
    done = call("jobs", "hours", "--json")
    rows = json.loads(done.stdout.removeprefix(done.stderr))["rows"]
    assert [(r["folder"], r["total_gpu_hours"]) for r in rows] == [
        ("logs/a", None),
        ("logs/h200/b", None),
    ]
    assert "logs/cut: skipped" in done.stderr
