"""Every study runs end to end on a CPU: its runs, its sweep, its tables and its plots.

The tables of one study must agree with each other.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from jobs.frame.results import list_results
from jobs.report.tables.report_table import make_report_table
from jobs.results.manifest import read_manifests
from jobs.results.run_states import observe
from jobs.sweep.expand import expand
from jobs.sweep.load import load_sweep
from systems.training.parallel_timing import exposed_facts, facts_of_ranks
from tests.jobs.harness import ROOT, call, records
from tests.jobs.results_folder import Outcome, ResultsFolder, rows_of

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


@pytest.mark.slow
@pytest.mark.parametrize(
    "sweep", [path for path in STUDIES if is_repeated(path)], ids=lambda path: path.stem
)
def test_a_study_with_repeats_or_blocks_on_a_processor(sweep: Path, tmp_path: Path) -> None:
    submit(sweep, tmp_path / "out")
    check_tables(tmp_path / "out")


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
        block = f"{params['precision']} {params['cuda_graph']}"
        return {
            "status": "ok",
            "measurements": {
                "samples_ms": {name: [of[name] for of in samples] for name in samples[0]},
                "facts": facts_of_ranks(samples) | exposed_facts(samples),
            },
            "block": {
                "id": block,
                "round": round,
                "execution": f"{block} {round}",
                "position": 0,
                "size": 8,
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
    assert len(pairs) == 24
    for times, rest in pairs:
        step, alone = (float(times[name].split()[0]) for name in ("train_step", "alone"))
        exposed = rest["exposed (ms)"].split()[0]
        # Half a unit in the last printed place of each number: 0.05 of 600.0, 0.005 of 30.00.
        assert step - alone == pytest.approx(float(exposed), abs=0.05 + 0.05 + 0.005 + 1e-9)
