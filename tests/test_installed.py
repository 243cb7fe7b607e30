"""Tests that the project, installed from a wheel, works in any folder without the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.jobs.harness import ROOT, artifacts_of, facts, records

SOURCES = ("pyproject.toml", "README.md", "aggregate.py", "jobs", "systems", "sweeps")
# A user's own benchmark. It reports from which files its process has imported the project.
BENCHMARK = """
import jobs, systems
from pathlib import Path
from systems.benchmark import BenchmarkParams, artifacts_folder

PRELOAD = ()

class Params(BenchmarkParams):
    size: int

def run(params):
    (artifacts_folder() / "left.txt").write_text("by the run")
    return {"samples_ms": {"forward": [1.0]}, "facts": {"files": [jobs.__file__, systems.__file__]}}
"""
SWEEP = "{name: my, benchmark: own.nothing, grid: {size: [1, 2]}, resources: {gpus_per_node: 0}}"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel, install it into a folder, and return the folder.

    Pip builds the wheel with the setuptools of this environment, because there is no network. It
    builds from a copy, because setuptools writes files next to the sources.
    """
    pytest.importorskip("pip")
    folder = tmp_path_factory.mktemp("wheel")
    copy, site = folder / "source", folder / "site"
    copy.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, copy)
    offline = ["--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    pip = [sys.executable, "-m", "pip"]
    build = ["wheel", str(copy), "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*pip, *build, *offline], check=True)
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", str(wheel), "--target", str(site), *offline], check=True)
    return site


@pytest.fixture
def elsewhere(tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to an empty folder in which the installed project is imported, not the repository."""
    monkeypatch.chdir(tmp_path)
    # Comes before the repository on the import path.
    monkeypatch.setenv("PYTHONPATH", str(installed), prepend=os.pathsep)
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    return tmp_path


def python(*arguments: str) -> str:
    """Run `python -m ARGUMENTS`, check that its exit code is 0, and return its output."""
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=240
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_wheel_holds_every_file_that_git_tracks(installed: Path) -> None:
    folders = ["aggregate.py", "jobs", "systems", "sweeps"]
    done = subprocess.run(["git", "ls-files", *folders], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("no repository")
    (wheel,) = installed.parent.glob("*.whl")
    tracked = {name for name in done.stdout.split() if (ROOT / name).exists()}
    assert tracked and not tracked - set(ZipFile(wheel).namelist())


def test_a_sweep_and_a_benchmark_of_ones_own(elsewhere: Path, installed: Path) -> None:
    (elsewhere / "own").mkdir()
    (elsewhere / "own" / "nothing.py").write_text(BENCHMARK)
    (elsewhere / "my.yaml").write_text(SWEEP)
    told = python("jobs.submit", "my.yaml", "--local")
    assert "2 ok" in told and "python -m aggregate logs/my" in told
    for record in records(elsewhere / "logs" / "my"):
        files = [str(installed / name / "__init__.py") for name in ("jobs", "systems")]
        assert facts(record)["files"] == files
        assert artifacts_of(elsewhere / "logs" / "my", record) == {"left.txt": "by the run"}
        assert record.environment["git"]["commit"] is None
        assert record.environment["packages"]["cluster-sweeps"]
    assert "2 runs, 1 submission " in " ".join(python("jobs", "status").split())
    assert "| size |" in " ".join(python("aggregate", "logs/my").split())


def test_a_stock_sweep(elsewhere: Path) -> None:
    one = ["--filter", "seq_len == 128 and implementation == naive"]
    assert "1 ok" in python("jobs.submit", "sweeps/quickstart.yaml", "--local", *one)
    tables = python("aggregate", "logs/quickstart", "--views", "sweeps/quickstart.yaml")
    assert "Time of causal attention" in tables
