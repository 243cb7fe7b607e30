"""What is read from a results folder: records, states of runs, and keys of later versions."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from jobs.processes import ProcessHandle
from jobs.report import load
from jobs.results.manifest import Executor, read_manifest, write_handles, write_manifest
from jobs.results.record_reader import RecordTail
from jobs.results.run_states import observe
from jobs.results.slurm_job import SlurmJob
from jobs.status import Status
from jobs.sweep.load import load_sweep
from jobs.writeup.assemble import make_document
from jobs.writeup.document import State
from jobs.writeup.studies import read_studies
from tests.jobs.harness import ROOT, call
from tests.jobs.results_folder import TOY, Outcome, ResultsFolder, failed, ok


def test_compressed_records_count_and_damaged_ones_are_named(folder: ResultsFolder) -> None:
    folder.submit(TOY + "fixed: {size: 1}\n", ok(1.0))
    plain = observe(folder.path)
    (path,) = (folder.path / "records").iterdir()
    packed = path.with_name(path.name + ".gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    assert observe(folder.path).records == plain.records
    tail = RecordTail(folder.path, {record.run for record in plain.records})
    assert tail.new() == plain.records and tail.new() == []
    path.write_bytes(gzip.decompress(packed.read_bytes()))
    assert observe(folder.path).records == plain.records  # not twice
    path.unlink()
    whole = packed.read_bytes()
    for damaged in (whole[:-20], b"no gzip", b"", whole[:40] + b"\0" * 40):
        packed.write_bytes(damaged)
        (bad,) = observe(folder.path).bad_lines
        assert bad.path == packed


TWO = TOY + "grid: {size: [1, 2]}\n"
FIRST_FAILS: list[Outcome] = [failed("error"), None]


def test_a_retry_that_was_cancelled_leaves_the_earlier_failure(folder: ResultsFolder) -> None:
    folder.submit(TWO, FIRST_FAILS)
    retry = folder.submit(TWO, None)
    write_handles(replace(retry, handles={0: ProcessHandle(1, 1, "host", interrupted=True)}))
    states = {task.run.params["size"]: task for task in observe(folder.path).tasks}
    assert states[1].status is Status.error and states[1].record is not None
    assert states[2].status is Status.cancelled


def test_a_run_that_was_repeated_while_its_state_was_unknown_has_the_new_state(
    folder: ResultsFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")  # no Slurm, which could answer
    on_slurm = replace(folder.submit(TWO, None), executor=Executor.slurm)
    on_slurm.handles.update({job.index: SlurmJob(f"7_{job.index}") for job in on_slurm.jobs})
    write_manifest(on_slurm)
    write_handles(on_slurm)
    assert {task.status for task in observe(folder.path).tasks} == {Status.unknown}
    folder.submit(TWO, FIRST_FAILS)
    states = {task.run.params["size"]: task.status for task in observe(folder.path).tasks}
    assert states == {1: Status.error, 2: Status.unknown}


def test_status_tells_results_of_older_code(folder: ResultsFolder) -> None:
    """Of four runs, one is of older code, one without a hash, one of this code, one missing."""
    older, unknown = (ok(1.0) | {"source_hash": code} for code in ("0" * 16, None))
    folder.submit(TOY + "grid: {size: [1, 2, 3, 4]}\n", [older, unknown, ok(1.0), None])

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


def test_code_that_is_not_found_is_told(
    folder: ResultsFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found from one folder and not from another, and is neither older nor the present."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "own.py").write_text("def f(q, k, v, is_causal): return v\n")
    monkeypatch.chdir(home)
    fixed = "fixed: {implementation: own.py:f, seq_len: 128, head_dim: 64}\n"
    folder.submit(f"name: own\nbenchmark: attention\n{fixed}", ok(1.0) | {"source_hash": "0" * 16})

    def shown() -> tuple[list[str], Any, State]:
        """Return what the commands print, the value in an export, and the state in a report."""
        told = [call(*each, folder.path).stdout for each in (["jobs", "status"], ["aggregate"])]
        studies, _ = read_studies([folder.path])
        (own,) = make_document([], studies, [], []).problems
        return told, load(folder.path)["stale"].iloc[0], own.state

    told, *others = shown()
    assert all("from older code" in text and "not found" not in text for text in told)
    assert others == [True, State.stale]
    monkeypatch.chdir(tmp_path)
    told, stale, state = shown()
    assert all("the code of 1 of 1 result is not found" in text for text in told)
    assert stale is pd.NA and state is State.unknown


def test_a_folder_without_a_submission_is_not_in_a_report(
    folder: ResultsFolder, tmp_path: Path
) -> None:
    folder.submit(TOY + "fixed: {size: 1}\n", ok(1.0))
    empty = tmp_path / "empty"
    (empty / "submissions").mkdir(parents=True)
    studies, notes = read_studies([empty, folder.path])
    assert studies and any("not in this report" in note for note in notes)


LATER = {"added_later": {"a": [1]}}


@pytest.mark.parametrize("executor", [Executor.local, Executor.slurm])
def test_keys_that_a_later_version_adds_are_ignored(
    folder: ResultsFolder, executor: Executor
) -> None:
    loaded = load_sweep(ROOT / "sweeps" / "transformer.yaml")
    manifest = folder.submit(loaded, lambda p, repeat: ok(1.0) if p["size"] == "xl" else None)
    handle = {"slurm": "1"} if executor is Executor.slurm else {"pid": 1, "started": 2, "host": "x"}
    (manifest.path / "handles.json").write_text(json.dumps({"0": handle}))
    snapshot = {"folder": "a", "cwd": "b", "python_path": []}
    path = manifest.path / "manifest.json"
    data = json.loads(path.read_text()) | {"snapshot": snapshot, "executor": executor}
    # An option that was accepted before it was reserved
    data["sweep"]["slurm"]["additional_parameters"] = {"signal": "B:USR1@60"}
    path.write_text(json.dumps(data))
    before, tasks = read_manifest(manifest.path), observe(folder.path).tasks

    table = next(table for table in data["sweep"]["tables"] if table["published"])
    in_sweep = [data["sweep"], data["sweep"]["cases"][0], table, table["published"][0]]
    lists = [data[name][0] for name in ("runs", "shapes", "jobs")]
    for part in (data, data["snapshot"], *in_sweep, *lists):
        part |= LATER
    path.write_text(json.dumps(data))
    (manifest.path / "handles.json").write_text(json.dumps({"0": handle | LATER}))
    for file in (folder.path / "records").iterdir():
        lines = [json.loads(line) | LATER for line in file.read_text().splitlines()]
        for line in lines:
            line["measurements"] |= LATER
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    after, seen = read_manifest(manifest.path), observe(folder.path)
    assert after == before and after.handles == before.handles and len(after.handles) == 1
    assert not seen.bad_lines and [task.status for task in seen.tasks] == [t.status for t in tasks]
    assert {task.status for task in seen.tasks} > {Status.ok}
