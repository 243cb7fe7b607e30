"""Every study runs end to end on a CPU: its sweep, its tables and its plots.

The tables of one study must agree with each other.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs.report.results import list_results
from jobs.report.tables.report_table import make_report_table
from jobs.results.run_states import observe
from jobs.sweep.load import load_sweep
from systems.training.parallel_timing import exposed_facts, facts_of_ranks
from tests.jobs.harness import ROOT, records, run
from tests.jobs.results_folder import Outcome, ResultsFolder, rows_of

STUDIES = sorted((ROOT / "sweeps" / "cpu").glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize("sweep", STUDIES, ids=lambda path: path.stem)
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


def test_the_printed_times_of_ddp_add_up(tmp_path: Path) -> None:
    """A step less the step without communication is the exposed communication, in each row."""
    numbers = random.Random(0)

    def measured(params: dict[str, Any], repeat: int) -> Outcome:
        if params["backend"] == "gloo":
            return None
        # The second GPU is slower, and all samples vary as much as the exposed communication.
        samples = [
            {
                "train_step": [660 + numbers.uniform(0, 20) for _ in range(params["rounds"])],
                "alone": [slower + numbers.uniform(0, 20) for _ in range(params["rounds"])],
            }
            for slower in (620, 640)
        ]
        baseline = params["strategy"] == "torch_tuned"
        round = repeat // 2 if baseline else repeat
        return {
            "status": "ok",
            "measurements": {
                "samples_ms": {name: [of[name] for of in samples] for name in samples[0]},
                "facts": facts_of_ranks(samples) | exposed_facts(samples),
            },
            "block": {
                "id": params["precision"],
                "round": round,
                "execution": f"{params['precision']} {round}",
                "position": 0,
                "size": 7,
                "baseline": baseline,
                "second": baseline and repeat % 2 == 1,
            },
        }

    loaded = load_sweep(ROOT / "sweeps" / "ddp.yaml")
    ResultsFolder(tmp_path / "results").submit(loaded, measured)
    observation = observe(tmp_path / "results")
    tables = {view.name: view for view in loaded.sweep.tables}
    shown = {
        name: make_report_table(observation, tables[name], list_results(observation))
        for name in ("time", "communication")
    }
    assert shown["time"] is not None and shown["communication"] is not None
    pairs = [
        (times, rest)
        for times, rest in zip(rows_of(shown["time"]), rows_of(shown["communication"]), strict=True)
        if times["size"] == "xl"
    ]
    assert len(pairs) == 12
    for times, rest in pairs:
        step, alone = (float(times[name].split()[0]) for name in ("train_step", "alone"))
        exposed = rest["exposed (ms)"].split()[0]
        # Half a unit in the last printed place of each number: 0.05 of 600.0, 0.005 of 30.00.
        assert step - alone == pytest.approx(float(exposed), abs=0.05 + 0.05 + 0.005 + 1e-9)
