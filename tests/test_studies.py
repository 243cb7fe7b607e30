"""Every study runs end to end on a CPU: its sweep, its tables and its plots."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs.harness import ROOT, records, run

STUDIES = sorted((ROOT / "sweeps" / "cpu").glob("*.yaml"))
# The first runs in one process and has plots. The second runs on two ranks and leaves a picture.
FAST = ("flash_heads", "ddp")


@pytest.mark.parametrize(
    "sweep",
    [
        pytest.param(path, id=path.stem, marks=() if path.stem in FAST else pytest.mark.slow)
        for path in STUDIES
    ],
)
def test_study_on_a_processor(sweep: Path, tmp_path: Path) -> None:
    done = run("jobs.submit", sweep, "--local", "--out", tmp_path / "results")
    assert done.returncode == 0, done.stdout
    assert {record.status for record in records(tmp_path / "results")} == {"ok"}
    tables = subprocess.run(
        [sys.executable, "aggregate.py", tmp_path / "results", "--plot", tmp_path / "plots"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert tables.returncode == 0, tables.stderr
    assert "###" in tables.stdout and "missing" not in tables.stdout


def test_every_study_has_a_variant_for_a_processor() -> None:
    needing_gpus_or_long_there = {"all_reduce", "flash_hopper", "flash_leaderboard", "quickstart"}
    studies = {path.stem for path in (ROOT / "sweeps").glob("*.yaml")}
    assert {path.stem for path in STUDIES} == studies - needing_gpus_or_long_there
