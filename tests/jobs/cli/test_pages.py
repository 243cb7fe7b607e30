"""`list` shows what is in all results folders, `show` all about one run, `status --all` all ids."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.jobs.harness import call
from tests.jobs.results_folder import TOY, ResultsFolder, failed, load, ok


def measured(tmp_path: Path) -> tuple[ResultsFolder, dict[int, str]]:
    """Return a folder in which one run is ok and one failed, and their ids by size."""
    folder = ResultsFolder(tmp_path / "logs" / "mine")
    sweep = TOY + "grid: {size: [1, 2]}\nresources: {gpus_per_node: 2}\n"
    manifest = folder.submit(
        load(tmp_path, sweep),
        lambda params, _: ok(2.0, 4.0, 3.0, weight=7.5) if params["size"] == 1 else failed("error"),
    )
    return folder, {run.params["size"]: run.id for run in manifest.runs.values()}


def test_list_counts_states_and_gpu_hours_of_every_folder(tmp_path: Path) -> None:
    folder, _ = measured(tmp_path)
    (tmp_path / "logs" / "deeper" / "other").mkdir(parents=True)
    (row,) = json.loads(call("jobs", "list", tmp_path / "logs", "--json").stdout)
    assert Path(row["folder"]).name == "mine" and row["runs"] == 2
    assert row["states"] == {"ok": 1, "error": 1}
    files = (folder.path / "records").glob("*.jsonl")
    records = [json.loads(line) for file in files for line in file.open()]
    seconds = sum(record["finished_at"] - record["started_at"] for record in records)
    assert row["gpu_hours"] * 3600 == pytest.approx(2 * seconds) and seconds > 0
    assert row["newest"] >= max(record["finished_at"] for record in records)
    assert "1 ok, 1 error" in call("jobs", "list", folder.path).stdout
    absent = call("jobs", "list", tmp_path / "nothing")
    assert absent.returncode == 2 and "nothing" in absent.stderr


def test_show_has_the_figures_of_a_run_and_why_another_failed(tmp_path: Path) -> None:
    folder, ids = measured(tmp_path)
    page = call("jobs", "show", ids[1][:6], "--in", folder.path).stdout
    assert ids[1] in page and "size=1" in page and "2 GPUs per node" in page
    assert " 3.000 " in page, "the median of its samples"
    assert f"replay {ids[1]}" in page
    log = next(folder.path.glob("submissions/*/jobs/0")) / f"{ids[2]}-0-1.log"
    log.write_text("".join(f"line {i} of the log\n" for i in range(50)))
    page = call("jobs", "show", ids[2], "--in", folder.path).stdout
    assert "error: RuntimeError: as asked" in page
    assert "line 49 of the log" in page and "line 3 of the log" not in page


def test_status_lists_runs_that_are_ok_only_if_asked(tmp_path: Path) -> None:
    folder, ids = measured(tmp_path)
    assert ids[1] not in call("jobs", "status", folder.path).stdout
    every = call("jobs", "status", folder.path, "--all").stdout
    assert ids[1] in every and ids[2] in every
