"""Every study runs end to end on a CPU: its runs, its sweep, its tables and its plots."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from jobs.results.manifest import read_manifests
from jobs.sweep.expand import expand
from jobs.sweep.load import load_sweep
from tests.jobs.harness import ROOT, call, records

STUDIES = sorted((ROOT / "sweeps" / "cpu").glob("*.yaml"))


def submit(sweep: Path, out: Path) -> None:
    done = call("jobs.submit", sweep, "--local", "--out", out)
    assert done.returncode == 0, done.stdout
    assert {record.status for record in records(out)} == {"ok"}


def check_tables(out: Path) -> None:
    done = call("aggregate", out, "--plot", out / "plots")
    assert done.returncode == 0, done.stdout
    assert "###" in done.stdout and "missing" not in done.stdout


def is_repeated(sweep: Path) -> bool:
    loaded = load_sweep(sweep).sweep
    return loaded.repeats > 1 or loaded.blocks is not None


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_studies_on_a_processor(tmp_path: Path) -> None:
    """The runs of all studies are one submission. Each study then finds the records of its runs."""
    studies = [path for path in STUDIES if not is_repeated(path)]
    runs = {run.id: run for path in studies for run in expand(load_sweep(path)).runs}
    cases = [
        {
            "benchmark": run.benchmark,
            "fixed": run.params,
            "resources": {"cpus_per_task": run.shape.cpus_per_task},
            "launch": {"nproc_per_node": run.shape.nproc_per_node},
            "timeout_s": run.timeout_s,
        }
        for run in runs.values()
    ]
    all_runs = tmp_path / "all.yaml"
    all_runs.write_text(json.dumps({"name": "all", "benchmark": "attention", "cases": cases}))
    submit(all_runs, tmp_path / "all")
    assert len(records(tmp_path / "all")) == len(runs)
    for path in studies:
        out = tmp_path / path.stem
        shutil.copytree(tmp_path / "all", out, ignore=shutil.ignore_patterns("submissions"))
        submit(path, out)
        assert [manifest.jobs for manifest in read_manifests(out)] == [[]]
        check_tables(out)
    assert "is empty" not in call("aggregate", tmp_path / "profile").stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "sweep", [path for path in STUDIES if is_repeated(path)], ids=lambda path: path.stem
)
def test_a_study_with_repeats_or_blocks_on_a_processor(sweep: Path, tmp_path: Path) -> None:
    submit(sweep, tmp_path / "out")
    check_tables(tmp_path / "out")


def test_every_study_has_a_variant_for_a_processor() -> None:
    needing_gpus_or_long_there = {"flash_hopper", "flash_leaderboard", "quickstart"}
    studies = {path.stem for path in (ROOT / "sweeps").glob("*.yaml")}
    assert {path.stem for path in STUDIES} == studies - needing_gpus_or_long_there
