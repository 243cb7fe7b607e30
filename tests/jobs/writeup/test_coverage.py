"""The cells that a part of a problem asks for are counted in the results folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from jobs.sweep.load import load_sweep
from jobs.writeup.coverage import Coverage, coverage_on
from jobs.writeup.document import State
from jobs.writeup.studies import read_studies
from jobs.writeup.traced import without_marks
from tests.jobs.harness import ROOT
from tests.jobs.results_folder import H200, Outcome, ResultsFolder, failed, ok
from tests.jobs.writeup.test_document import part_of

ANSWER = '{{ value("time", "forward", size="small", warmup_steps=5) | n }} ms'


def submitted(folder: ResultsFolder, outcome_of: Any) -> None:
    folder.submit(load_sweep(ROOT / "sweeps" / "warmup.yaml"), outcome_of, H200)


def cells_in(folder: ResultsFolder, sweep: str, filter: str | None = None) -> Coverage:
    return coverage_on(read_studies([folder.path])[0][H200][sweep], filter)


def partly(params: dict[str, Any], repeat: int) -> Outcome:
    """The sweep asks for three executions of every run."""
    if params["size"] == "2.7b":
        return failed("error") if params.get("warmup_steps") == 5 else None
    if params["size"] == "xl" and repeat == 2:
        return None
    if params["size"] == "large":  # it is not executed again
        return None if repeat else failed("oom", memory="gpu")
    return ok(4.0) | ({"source_hash": "0123"} if params["size"] == "small" else {})


def test_what_is_missing_too_seldom_or_of_older_code(folder: ResultsFolder) -> None:
    submitted(folder, partly)
    cells = cells_in(folder, "warmup", "benchmark == train_step")
    counts = map(len, (cells.asked, cells.missing, cells.failed, cells.few, cells.stale))
    assert tuple(counts) == (20, 4, 1, 4, 4)
    assert {cells.asked[id].params["size"] for id in cells.missing} == {"2.7b"}
    assert {cells.asked[id].params["size"] for id in cells.few} == {"xl"}
    assert {cells.asked[id].params["size"] for id in cells.stale} == {"small"}
    assert "size 2.7b" in cells.text and "size xl" in cells.text
    assert "--retry-failed" in cells.text
    large = {id for id, run in cells.asked.items() if run.params["size"] != "small"}
    assert "not measured: all but size small" in replace(cells, missing=frozenset(large)).text
    all_of_it = cells_in(folder, "warmup")
    assert (cells | all_of_it).count == all_of_it.count == "20 of 25 cells"
    assert not cells_in(folder, "warmup", "size == medium").stale


def test_a_part_is_answered_when_all_its_cells_are(folder: ResultsFolder) -> None:
    def state(filter: str) -> State:
        return part_of(ANSWER, folder, sweep="warmup", show=[], filter=filter).state

    submitted(folder, partly)
    assert state("size in (small, medium)") is State.stale
    submitted(
        folder,
        lambda params, repeat: partly(
            params | {"size": "medium"} if params["size"] == "small" else params, repeat
        ),
    )
    assert state("size in (small, medium, large)") is State.answered
    assert state("size in (small, xl)") is State.partly


def test_a_benchmark_of_the_sweep_that_was_not_submitted(folder: ResultsFolder) -> None:
    loaded = load_sweep(ROOT / "sweeps" / "warmup.yaml", filter="benchmark == train_step")
    folder.submit(loaded, ok(4.0), H200)
    both = ANSWER + '\n\n{{ items("first_steps", benchmark="first_steps", size="small") }}'
    (view,) = part_of(both, folder, sweep="warmup", show=[]).views
    assert view.state is State.partly and view.answer.problem == ""
    assert without_marks(view.text).startswith("4.000 ms")
    assert "benchmark first_steps" in view.coverage.text


def test_a_cell_of_a_block_is_asked_for_in_three_rounds(tmp_path: Path) -> None:
    loaded = load_sweep(ROOT / "sweeps" / "fsdp.yaml", filter="precision == fp32")
    for rounds, few in ((2, 4), (3, 0)):
        folder = ResultsFolder(tmp_path / str(rounds))
        folder.submit_rounds(loaded, ok(4.0, phase="train_step"), rounds=range(rounds))
        cells = cells_in(folder, "fsdp", "precision == fp32")
        assert (len(cells.asked), len(cells.few), len(cells.missing)) == (4, few, 0)
