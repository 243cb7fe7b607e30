"""Submissions measure results of older code again, also if the code changes between them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jobs.frame.recorded import recorded_value
from jobs.launch.plan_submission import Options, prepare
from jobs.provenance import cpu_device
from jobs.results.counting import is_trial
from jobs.results.judgements import Judgement, write_judgement
from jobs.results.manifest import Executor, write_manifest
from jobs.worker.worker import Worker
from tests.jobs.checkout import own_repository
from tests.jobs.harness import records
from tests.jobs.results_folder import TOY, ResultsFolder, load, ok


@pytest.mark.slow
def test_an_edit_of_a_helper_module_of_the_user(tmp_path: Path) -> None:
    own = own_repository(tmp_path / "own")
    out = own.folder / "logs" / "own"
    own.submit()
    own.commit(helper="# A comment.\nVALUE = 'old'\n")
    assert "skipping 1 run with a result" in own.submit()
    own.commit(helper="VALUE = 'edited'\n")
    kept = own.submit("--keep-stale")
    assert "skipping 1 run with a result" in kept and "1 result of older code kept" in kept
    assert "1 result of older code measured again; --keep-stale" in own.submit("--snapshot")
    # The record of a run from a snapshot has the hash of the files that were copied.
    assert "skipping 1 run with a result" in own.submit()
    hashes = [record.source_hash for record in records(out)]
    assert len(hashes) == 2 == len(set(hashes)) and all(hashes)


@pytest.mark.slow
def test_code_that_changes_while_it_is_executed_has_no_commit(tmp_path: Path) -> None:
    own = own_repository(tmp_path / "own")
    own.commit(helper="VALUE = 'old'\nopen(__file__, 'a').write('OTHER = 1\\n')\n")
    own.submit()
    (record,) = records(own.folder / "logs/own")
    assert record.source_hash is None and recorded_value(record, "commit") == "unknown"


@pytest.mark.slow
def test_other_code_is_tried_again(tmp_path: Path) -> None:
    """So its output is checked, also if old results are kept. Only the baseline is always tried."""
    own = own_repository(tmp_path / "own", "0, 1")

    def tried(rounds: int, *options: str) -> list[Any]:
        blocks = f"blocks={{interleave: [index], baseline: {{index: 0}}, rounds: {rounds}}}"
        before = len(records(own.folder / "logs/own")) if rounds > 2 else 0
        own.submit(blocks, *options)
        new = records(own.folder / "logs/own")[before:]
        return [record.params["index"] for record in new if is_trial(record)]

    assert tried(2) == [0, 1]
    assert tried(3) == [0]
    (own.folder / "helper.py").write_text("VALUE = 'edited'\n")
    assert tried(4, "--keep-stale") == [0, 1]


def test_a_decision_on_code_that_was_undone_does_not_count(
    tmp_path: Path, folder: ResultsFolder
) -> None:
    sweep = (
        TOY
        + "grid: {size: [1], mode: [fast, exact]}\n"
        + "blocks: {interleave: [mode], baseline: {mode: fast}, rounds: auto, max_rounds: 5}\n"
    )
    loaded, options = load(tmp_path, sweep), Options(Executor.local, folder.path)
    cpu: dict[str, Any] = {"gpu": None, "rounds": range(3), "device": cpu_device()}

    def rounds_to_run(**fields: Any) -> set[int]:
        measured = folder.submit_rounds(loaded, ok(1.0), **cpu, **fields)
        (block,) = measured.blocks
        decided = Judgement(rounds=3, cells=1, undecided=[], margin=None, phases=[])
        write_judgement(measured.job_folder(0), block.id, decided)
        planned = prepare(loaded, options, "sweep.yaml").manifest
        return {block.round_of(task) for job in planned.jobs for task in job.tasks}

    assert rounds_to_run() == set()
    assert rounds_to_run(source_hash="tried and undone") == {3, 4}


@pytest.mark.parametrize("keep_stale", [False, True])
def test_a_worker_skips_what_another_submission_measured(
    tmp_path: Path, folder: ResultsFolder, keep_stale: bool
) -> None:
    """While a job waits, other submissions measure its runs, with the same code or other code."""
    loaded = load(tmp_path, TOY + "grid: {size: [1, 2, 3, 4]}\nruns_per_job: 4\n")
    options = Options(Executor.local, folder.path, keep_stale=keep_stale)
    waiting = prepare(loaded, options, "sweep.yaml").manifest
    write_manifest(waiting)
    older, unknown = (ok(1.0) | {"source_hash": code} for code in ("0" * 16, None))
    folder.submit(loaded, [ok(1.0), older, unknown, None], cpu_device())
    Worker(waiting, 0, in_process=True).run()
    made = [r for r in records(folder.path) if r.submission == waiting.id]
    assert [r.params["size"] for r in made] == ([4] if keep_stale else [2, 3, 4])
    assert all(r.source_hash == folder.sources.source_hash(waiting.runs[r.run]) for r in made)


def test_a_job_that_starts_again_keeps_the_results_of_its_submission(folder: ResultsFolder) -> None:
    """After an edit, a requeued job executes only the runs that it had not executed before."""
    old = ok(1.0) | {"source_hash": "0" * 16}
    sweep = TOY + "grid: {size: [1, 2]}\nruns_per_job: 2\n"
    requeued = folder.submit(sweep, [old, None], cpu_device(), force=False)
    Worker(requeued, 0, in_process=True).run()
    assert [r.params["size"] for r in records(folder.path)] == [1, 2]
