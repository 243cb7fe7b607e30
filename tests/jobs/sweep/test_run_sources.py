"""Which runs of this project become stale by which edits of its files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.code import sources
from jobs.code.imports import read_source
from jobs.results.manifest import read_manifests
from jobs.run import Run, Shape
from jobs.sweep.run_sources import RunSources
from systems.attentions import ATTENTIONS
from systems.external.reference import find_module
from systems.implementation_sources import of_training
from tests.jobs.harness import ROOT

FOLDERS = sorted(path for path in (ROOT / "logs" / "h200").iterdir() if path.is_dir())
RUNS = {
    run.id: run
    for folder in FOLDERS
    for manifest in read_manifests(folder)
    for run in manifest.runs.values()
}
# These do not use the timer of this project: they measure no time, or use another timer.
NOT_TIMED = {
    "attention_leaderboard", "autocast_dtypes", "accumulation", "first_steps", "training_loss"
}  # fmt: skip
StaleAfter = Callable[[str], set[str]]


def hashes() -> dict[str, str | None]:
    """Return the hash of each run of the reference results."""
    run_sources = RunSources()
    return {name: run_sources.source_hash(run) for name, run in RUNS.items()}


@pytest.fixture(scope="module")
def before() -> dict[str, str | None]:
    found = hashes()
    assert len(found) > 100 and all(found.values())
    return found


@pytest.fixture
def stale_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: dict[str, str | None]
) -> StaleAfter:
    """A function that returns the ids of the runs that are stale after an edit of a file."""

    def stale(name: str) -> set[str]:
        text = (ROOT / name).read_text()
        copy = tmp_path / "edited.py"
        copy.write_text(text.replace("\nfrom ", "\nEDITED = True\nfrom ", 1))
        monkeypatch.setattr(
            sources, "read_source", lambda path: read_source(copy if path == ROOT / name else path)
        )
        now = hashes()
        return {run for run in now if now[run] != before[run]}

    return stale


def test_an_edit_of_a_hopper_kernel(stale_after: StaleAfter) -> None:
    stale = stale_after("systems/kernels/flash_attention/hopper/backward/d64.py")
    assert stale == {
        id
        for id, run in RUNS.items()
        if "flash_hopper" in (run.params.get("implementation"), run.params.get("attention"))
        or run.benchmark == "attention_latency"  # which counts the files of all implementations
    }
    assert len(stale) > 10


def test_an_edit_of_the_timer(stale_after: StaleAfter) -> None:
    stale = stale_after("systems/measure/timing.py")
    assert stale == {id for id, run in RUNS.items() if run.benchmark not in NOT_TIMED}


def test_an_edit_of_a_wrapper(stale_after: StaleAfter) -> None:
    stale = stale_after("systems/parallel/ddp.py")
    assert {(RUNS[id].benchmark, RUNS[id].params["strategy"]) for id in stale} == {
        *(("data_parallel", name) for name in ("naive", "flat", "overlapped", "bucketed", "peer")),
        *(("sharded_optimizer", name) for name in ("replicated", "sharded", "peer", "torch_zero")),
    }


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_the_modules_that_a_run_leaves_out_exist(attention: str) -> None:
    """A module that is renamed must be renamed in the tables, too."""
    found = of_training(attention, "torch")
    modules = (*found.modules, *found.left_out)
    assert [name for name in modules if find_module(name) is None] == []


def test_runs_whose_sources_are_unknown() -> None:
    run_sources = RunSources()
    unknown = [
        Run("0", "gone", 1, {}, Shape(), 1.0),
        Run("1", "gone.bench", 1, {}, Shape(), 1.0),
        Run("2", "data_parallel", 1, {"of": "an old version"}, Shape(), 1.0),
        Run("3", "attention", 1, {"implementation": "gone"}, Shape(), 1.0),
        Run("4", "attention", 1, {"implementation": "gone.py:X"}, Shape(), 1.0, ("gone.py:X",)),
        Run("5", "accumulation", 1, {}, Shape(), 1.0, (), "another"),
    ]
    for run in unknown:
        assert run_sources.source_hash(run) is None
