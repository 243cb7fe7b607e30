"""The documentation is in step with the code: generated parts, examples, and lists of keys."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from jobs.launch.lock import SubmitLock
from jobs.results.heartbeat import HEARTBEAT
from jobs.results.latest import NOT_SEARCHED
from jobs.results.slurm_job_states import ENDED, REFUSAL
from jobs.results.worker_state import END, STATE
from jobs.status import Status
from jobs.sweep.expand import expand
from jobs.sweep.load import load_sweep
from jobs.sweep.resources import Launch, Resources, Slurm
from jobs.sweep.schema import Blocks, Sweep
from jobs.sweep.views import VALUES, Plot, Table
from tests.jobs.harness import ROOT, run_python

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.M | re.S)


@pytest.mark.slow
def test_generated_parts_are_up_to_date() -> None:
    done = run_python("scripts/update_docs.py", "--check")
    assert done.returncode == 0, done.stdout


def test_the_examples_of_sweep_files_are_valid(tmp_path: Path) -> None:
    path = tmp_path / "sweep.yaml"
    shown = set()
    for page in PAGES:
        for text in blocks(page, "yaml"):
            if "benchmark:" in text and "copy_tensor" not in text:
                path.write_text(text)
                assert expand(load_sweep(path)).runs, (page, text)
                shown.add(page.name)
    assert shown >= {"README.md", "sweep_files.md", "cluster.md"}


def test_the_examples_of_cluster_files_are_valid(tmp_path: Path) -> None:
    clusters = [text for text in blocks(DOCS / "cluster.md", "yaml") if "benchmark" not in text]
    assert len(clusters) == 3  # plain, apptainer and pyxis
    (tmp_path / "sweep.yaml").write_text("name: own\nbenchmark: attention\n")
    for cluster in clusters:
        (tmp_path / "cluster.yaml").write_text(cluster)
        loaded = load_sweep(tmp_path / "sweep.yaml", cluster=tmp_path / "cluster.yaml")
        given = yaml.safe_load(cluster)
        for section in (loaded.sweep.slurm, loaded.sweep.resources):
            name = type(section).__name__.lower()
            assert given[name].items() <= section.model_dump().items()


def test_the_example_of_a_prediction_prints_what_it_says(capsys: pytest.CaptureFixture) -> None:
    (example,) = blocks(DOCS / "measurement.md", "python")
    exec(example)
    assert capsys.readouterr().out.strip() == example.rpartition("# ")[2].strip()


@pytest.mark.parametrize(
    ("model", "prefix"),
    [(Sweep, ""), (Table, ""), (Plot, ""), (Resources, "resources."), (Launch, "launch."),
     (Slurm, "slurm."), (Blocks, "blocks.")],
)  # fmt: skip
def test_every_key_of_a_sweep_file_is_documented(model: type[BaseModel], prefix: str) -> None:
    text = (DOCS / "sweep_files.md").read_text()
    sections = {"resources", "launch", "slurm", "blocks", "tables", "plots"}
    for name, field in model.model_fields.items():
        key = field.alias or name
        if model is not Sweep or key not in sections:
            assert f"`{prefix}{key}`" in text, key


def test_every_study_is_listed() -> None:
    listed = re.findall(r"^\| \[(\w+)\]", (DOCS / "studies.md").read_text(), re.M)
    assert sorted(listed) == sorted(path.stem for path in (ROOT / "sweeps").glob("*.yaml"))


def test_every_value_and_status_is_documented() -> None:
    sweeps, folders = (
        (DOCS / name).read_text() for name in ("sweep_files.md", "results_folders.md")
    )
    assert [value for value in VALUES if f"`{value}`" not in sweeps] == []
    assert [status for status in Status if f"`{status}`" not in folders] == []


def test_every_file_of_a_results_folder_is_documented() -> None:
    page = (DOCS / "results_folders.md").read_text()
    table = page.partition("## Files of a results folder\n")[2].partition("\n## ")[0]
    in_submission = (HEARTBEAT, ENDED, REFUSAL, STATE, END)
    names = [*NOT_SEARCHED, SubmitLock.NAME, "manifest.json", "handles.json"]
    names += [*in_submission, "worker.log", "cannot-write-", "slurm/", "logs/.latest.json"]
    assert [name for name in names if name not in table] == []


@pytest.mark.slow
def test_the_example_of_a_benchmark_runs(tmp_path: Path) -> None:
    page = DOCS / "new_benchmark.md"
    (module,), (sweep,) = blocks(page, "python"), blocks(page, "yaml")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "copy_tensor.py").write_text(module)
    (tmp_path / "copy_tensor.yaml").write_text(
        sweep.replace("benchmark: copy_tensor", "benchmark: own.copy_tensor")
    )

    def run(*arguments: str) -> str:
        environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
        done = run_python("-m", *arguments, environment=environment, folder=tmp_path)
        assert done.returncode == 0, done.stdout
        return done.stdout

    assert "3 ok" in run("jobs.submit", "copy_tensor.yaml", "--local")
    table = run("aggregate", "logs/copy_tensor")
    assert "bandwidth (GB/s)" in table and "100" in table
