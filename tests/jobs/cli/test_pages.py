"""`list` shows all results folders, and `show` and `logs` one run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.processes import ProcessHandle
from jobs.results.manifest import new_id, write_handles, write_manifest
from jobs.results.record_writer import RecordWriter
from jobs.results.worker_state import RunningAttempt, WorkerState, write_worker_state
from tests.jobs.harness import call, grow_old
from tests.jobs.results_folder import TOY, ResultsFolder, failed, load, ok


def measured(tmp_path: Path) -> tuple[ResultsFolder, dict[int, str]]:
    """Return a folder in which one run is ok and one failed, and their ids by size."""
    folder = ResultsFolder(tmp_path / "logs" / "mine")
    sweep = TOY + "grid: {size: [1, 2]}\nresources: {gpus_per_node: 2}\n"
    manifest = folder.submit(load(tmp_path, sweep), [ok(2.0, 4.0, 3.0), failed("error")])
    write_manifest(replace(manifest, command="python -m jobs.submit sweep.yaml"))
    write_manifest(replace(manifest, id=new_id(), command="python -m jobs retry logs/mine"))
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
    assert f"python -m jobs.submit sweep.yaml --out {folder.path} --force " in page
    log = next(folder.path.glob("submissions/*/jobs/0")) / f"{ids[2]}-0-1.log"
    log.write_text("".join(f"line {i} of the log\n" for i in range(50)))
    page = call("jobs", "show", ids[2], "--in", folder.path).stdout
    assert "error: RuntimeError: as asked" in page and "--retry-failed" in page
    assert "line 49 of the log" in page and "line 3 of the log" not in page
    assert "error: RuntimeError: as asked (1 run)" in call("jobs", "tables", folder.path).stdout


def test_the_log_of_another_attempt_is_not_shown(folder: ResultsFolder) -> None:
    """The second repeat was not executed in its second attempt, because the first one failed."""
    manifest = folder.submit(TOY + "fixed: {size: 1}\nrepeats: 2\n", None)
    (run,) = manifest.runs.values()
    writer = RecordWriter(folder.path / "records", manifest.id)
    for attempt, status in ((1, "error"), (2, "wrong")):
        for repeat in (0, 1):
            log = manifest.job_folder(0) / f"{run.id}-{repeat}-{attempt}.log"
            executed = attempt == 1 or repeat == 0
            if executed:
                log.write_text(f"output of attempt {attempt}, repeat {repeat}\n")
            record = folder.record(manifest, run, repeat, failed(status))
            path = str(log.relative_to(folder.path)) if executed else None
            assert writer.write(record.model_copy(update={"attempt": attempt, "log": path}))
    shown = call("jobs", "logs", run.id, "--in", folder.path).stdout
    assert "-> wrong" in shown and "output of attempt 2, repeat 0" in shown, shown
    (manifest.job_folder(0) / f"{run.id}-0-2.log").unlink()
    shown = call("jobs", "logs", run.id, "--in", folder.path).stdout
    assert "-> wrong" in shown and "output of attempt" not in shown, shown


def test_the_log_of_a_dead_attempt_is_not_followed(folder: ResultsFolder) -> None:
    """Attempts without a record are counted anew in each submission."""
    sweep = TOY + "fixed: {size: 1}\n"
    dead, live = folder.submit(sweep, None), folder.submit(sweep, None)
    (run,) = live.runs
    old, new = dead.job_folder(0) / f"{run}-0-2.log", live.job_folder(0) / f"{run}-0-1.log"
    old.touch()
    grow_old(old, 60)
    new.touch()
    live.handles[0] = ProcessHandle.of_this_process()
    write_handles(live)
    running = RunningAttempt(run=run, repeat=0, attempt=1)
    write_worker_state(live.job_folder(0), WorkerState(running=running))
    shown = call("jobs", "logs", run, "--in", folder.path).stdout
    assert f"tail -F {new}\n# {new}\n" in shown
