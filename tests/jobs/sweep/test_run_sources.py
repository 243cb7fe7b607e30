"""Which runs of this project become stale by which edits, in a copy of the project."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args

import pytest

from jobs.results.manifest import read_manifests
from jobs.run import Run, Shape
from jobs.sweep.benchmarks import Benchmark, known_benchmarks
from jobs.sweep.run_sources import RunSources
from systems.benchmark import Sources
from systems.external.parameter import Implementation
from systems.external.reference import find_module
from tests.jobs.checkout import Checkout, project_checkout
from tests.jobs.harness import ROOT

# Prints the source hash of each run in results folders.
HASHES = """\
import json, sys
from pathlib import Path
from jobs.results.manifest import read_manifests
from jobs.sweep.run_sources import RunSources
sources = RunSources()
manifests = [m for folder in sys.argv[1:] for m in read_manifests(Path(folder))]
runs = {run.id: run for manifest in manifests for run in manifest.runs.values()}
print(json.dumps({id: sources.source_hash(run) for id, run in runs.items()}))
"""
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


EDIT = ("\nfrom ", "\nEDITED = True\nfrom ")  # adds a statement before the first import


def hashes(project: Checkout) -> dict[str, str]:
    """Return the hash of each run of the reference results, computed by a copy of the project."""
    command = [sys.executable, "-c", HASHES, *map(str, FOLDERS)]
    done = subprocess.run(command, cwd=project.folder, capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    assert found.keys() == RUNS.keys() and all(found.values())
    return found


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    return project_checkout(tmp_path_factory.mktemp("project") / "sweeps")


@pytest.fixture(scope="module")
def before(project: Checkout) -> dict[str, str]:
    return hashes(project)


def stale_after(
    project: Checkout, before: dict[str, str], name: str, old: str, new: str
) -> set[str]:
    """Return the ids of the runs that are stale after an edit of a file, and undo the edit."""
    path = project.folder / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    try:
        now = hashes(project)
        return {run for run in now if now[run] != before[run]}
    finally:
        path.write_text(text)


@pytest.mark.slow
def test_an_edit_of_a_hopper_kernel(project: Checkout, before: dict[str, str]) -> None:
    name = "systems/kernels/flash_attention/hopper/backward/d64.py"
    stale = stale_after(project, before, name, *EDIT)
    assert stale == {
        id
        for id, run in RUNS.items()
        if "flash_hopper" in (run.params.get("implementation"), run.params.get("attention"))
    }
    assert len(stale) > 10


@pytest.mark.slow
def test_an_edit_of_the_timer(project: Checkout, before: dict[str, str]) -> None:
    name = "systems/measure/timing.py"
    stale = stale_after(project, before, name, *EDIT)
    assert stale == {id for id, run in RUNS.items() if run.benchmark not in NOT_TIMED}


@pytest.mark.slow
def test_an_edit_of_a_wrapper(project: Checkout, before: dict[str, str]) -> None:
    stale = stale_after(project, before, "systems/parallel/ddp.py", *EDIT)
    assert {(RUNS[id].benchmark, RUNS[id].params["strategy"]) for id in stale} == {
        *(("data_parallel", name) for name in ("naive", "flat", "overlapped", "bucketed")),
        *(("fsdp", name) for name in ("layers", "blocks", "fsdp2", "fsdp2_prefetch")),
        *(("sharded_optimizer", name) for name in ("replicated", "sharded", "torch_zero")),
    }


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("\nimport", "\n# A comment.\nimport"),
        pytest.param('"""', '"""More. ', marks=pytest.mark.slow),
        pytest.param("\n\n", "\n\n\n", marks=pytest.mark.slow),
    ],
)
def test_an_edit_of_a_comment(
    project: Checkout, before: dict[str, str], old: str, new: str
) -> None:
    assert not stale_after(project, before, "systems/measure/timing.py", old, new)


def names_of(benchmark: Benchmark, field: str) -> list[str]:
    """Return the implementations of this project that a parameter selects, [] if there is none."""
    info = benchmark.params.model_fields.get(field)
    if info is None:
        return []
    chosen = [each for each in info.metadata if isinstance(each, Implementation)]
    return list(chosen[0].names if chosen else get_args(info.annotation))


@pytest.mark.parametrize("name", known_benchmarks())
def test_the_modules_that_a_benchmark_leaves_out_exist(name: str) -> None:
    """A module that is renamed must be renamed in the tables, too."""
    from jobs.sweep.benchmarks import load_benchmark

    benchmark = load_benchmark(name)
    if benchmark.sources is None:
        return
    for field in ("implementation", "attention"):
        for value in names_of(benchmark, field):
            values: dict[str, Any] = {
                "attention": "naive",
                "optimizer": "torch",
                "strategy": "",
                "beside": None,
            }
            params = benchmark.params.model_construct(**(values | {field: value}))
            found = benchmark.sources(params)
            assert isinstance(found, Sources)
            modules = (*found.modules, *found.left_out)
            assert modules and [one for one in modules if find_module(one) is None] == []


def test_runs_whose_sources_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_sources.py").write_text(
        "import pydantic\nclass Params(pydantic.BaseModel): ...\ndef run(params): ...\n"
        "def sources(params): raise SystemExit(3)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    sources = RunSources()
    unknown = [
        Run("0", "gone", 1, {}, Shape(), 1.0),
        Run("1", "gone.bench", 1, {}, Shape(), 1.0),
        Run("2", "broken_sources", 1, {}, Shape(), 1.0),
        Run("3", "attention", 1, {"implementation": "gone"}, Shape(), 1.0),
        Run("4", "attention", 1, {"implementation": "gone.py:X"}, Shape(), 1.0, ("gone.py:X",)),
        Run("5", "accumulation", 1, {}, Shape(), 1.0, (), "another"),
    ]
    for run in unknown:
        assert sources.source_hash(run) is None
        assert not sources.is_stale("0" * 16, run)
        assert not sources.is_stale(None, run)


@pytest.mark.slow
def test_many_runs_are_fast() -> None:
    """100,000 runs take 2 s. A limit of 20 s leaves room for slow machines."""
    run = next(run for run in RUNS.values() if run.benchmark == "attention")
    sources = RunSources()
    started = time.process_time()
    for _ in range(100_000):
        sources.source_hash(run)
    assert time.process_time() - started < 20
