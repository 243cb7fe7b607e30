"""Tests that the project, installed from a wheel, works in any folder without the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.jobs.harness import ROOT, artifacts_of, facts, records, shell
from tests.jobs.launch.slurm_cluster import SlurmCluster

SOURCES = ("pyproject.toml", "README.md", "aggregate.py", "jobs", "systems", "sweeps")
# A user's own benchmark. It reports from which files its process has imported the project.
BENCHMARK = """
import jobs, systems
from pathlib import Path
from .sibling import latency
from systems.benchmark import BenchmarkParams, artifacts_folder

PRELOAD = ()

class Params(BenchmarkParams):
    size: int

def run(params):
    (artifacts_folder() / "left.txt").write_text("by the run")
    files = [jobs.__file__, systems.__file__]
    return {"samples_ms": {"forward": latency(params.size)}, "facts": {"files": files}}
"""
SIBLING = "def latency(size: int) -> list[float]:\n    return [1.0 * size] * 5\n"
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
def environment(tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Change to a folder with a sweep, a benchmark of one's own and an active environment `env`.

    Its interpreter finds the installed packages, but not the repository, through PYTHONPATH.
    """
    monkeypatch.chdir(tmp_path)
    Path("own").mkdir()
    Path("own/nothing.py").write_text(BENCHMARK)
    Path("own/sibling.py").write_text(SIBLING)
    Path("my.yaml").write_text(SWEEP)
    venv.create("env", symlinks=True)
    folder = tmp_path / "env" / "bin"
    script = (installed / "bin" / "sweeps").read_text().splitlines()
    (folder / "sweeps").write_text("\n".join([f"#!{folder / 'python'}", *script[1:], ""]))
    (folder / "sweeps").chmod(0o755)
    paths = [str(installed), sysconfig.get_path("purelib")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def printed_commands(told: str) -> list[str]:
    """Return the commands that a command prints for the user to run next."""
    return re.findall(r"^  (\S.* logs/\S+)$", told, re.MULTILINE)


@pytest.mark.slow
def test_the_wheel_has_every_file_that_git_tracks(environment: None, installed: Path) -> None:
    """Stock sweeps, too."""
    if (ROOT / ".git").exists():
        (wheel,) = installed.parent.glob("*.whl")
        packed = set(ZipFile(wheel).namelist())
        tracked = shell(f"git -C {ROOT} ls-files aggregate.py jobs systems sweeps").split()
        assert tracked and {name for name in tracked if (ROOT / name).exists()} <= packed
    stock = "sweeps/quickstart.yaml"
    chosen = "--filter 'seq_len == 128 and implementation == naive'"
    assert "1 ok" in shell(f"sweeps submit {stock} --local {chosen}")
    tables = shell(f"python -m aggregate logs/quickstart --views {stock}")
    assert "Time of causal attention" in tables


@pytest.mark.slow
def test_sweeps_run_in_any_folder_and_printed_commands_work_as_they_are(
    environment: None, installed: Path
) -> None:
    out = Path("logs/my")
    told = shell("python -m jobs.submit my.yaml --local")
    tables = "python -m jobs tables"
    assert "2 ok" in told and printed_commands(told) == [f"{tables} {out}"]
    assert "| size |" in " ".join(shell(f"{tables} {out}").split())
    for record in records(out):
        files = [str(installed / name / "__init__.py") for name in ("jobs", "systems")]
        assert facts(record)["files"] == files
        assert artifacts_of(out, record) == {"left.txt": "by the run"}
        assert record.environment["git"]["commit"] is None
        assert record.environment["packages"]["cluster-sweeps"]

    run = records(out)[0].run
    told = shell(f"sweeps replay {run[:8]} --in {out}")
    replay = f"python -m jobs submit logs/replay/{run}.yaml --debug --force --out logs/replay"
    assert told.startswith(f"{replay}\n")
    assert printed_commands(told) == [f"{tables} logs/replay"]
    assert "1 ok" in shell(replay)
    shell(f"{tables} logs/replay")


@pytest.mark.slow
def test_commands_that_are_printed_for_a_failed_run(environment: None) -> None:
    """The commands for a failed run work as printed; the exit code of `status` is 1."""
    Path("own/sibling.py").write_text("def latency(size):\n    1 / (size - 2)\n    return [1.0]")
    told = shell("env/bin/sweeps submit my.yaml --local", exit_code=1)
    tables, status, logs = printed_commands(told)
    assert tables == "python -m jobs tables logs/my"
    assert "| error |" in " ".join(shell(tables).split())
    assert re.fullmatch(r"python -m jobs logs [0-9a-f]{8} --in logs/my", logs)
    assert "ZeroDivisionError" in shell(logs)
    again = "python -m jobs submit my.yaml --local --out logs/my --retry-failed"
    assert f"\n  {again} " in shell(f"sweeps show {logs.split()[4]}")
    assert "1 error" in shell(again, exit_code=1)
    assert "error" in shell(status, exit_code=1)


@pytest.mark.slurm
@pytest.mark.slow
def test_code_of_ones_own_on_slurm(
    environment: None, slurm_cluster: SlurmCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A benchmark of the user, and a file as one argument, are found from the user's folder."""
    Path("my_kernels").mkdir()
    shutil.copy(ROOT / "examples" / "my_attention.py", "my_kernels/flash.py")
    for name, value in slurm_cluster.environment.items():
        monkeypatch.setenv(name, value)
    told = shell("env/bin/sweeps submit my.yaml")
    assert "submitted 2 runs as 2 jobs" in told
    printed = printed_commands(told)
    assert printed == [f"python -m jobs {name} logs/my" for name in ("status", "cancel", "tables")]
    attention = "'implementation=[my_kernels/flash.py:MyAttention,naive]' seq_len=64"
    told = shell(f"env/bin/sweeps submit sweeps/quickstart.yaml {attention} --out logs/attention")
    assert "submitted 2 runs as 1 job" in told
    folder = Path("logs/attention")
    slurm_cluster.wait_for(lambda: len(records(folder)) == 2, "both runs")
    assert {record.status for record in records(folder)} == {"ok"}
    table = shell("env/bin/sweeps tables logs/attention")
    assert "MyAttention" in table and "my_kernels" not in table
    own = Path("logs/my")
    slurm_cluster.wait_for(lambda: len(records(own)) == 2, "both runs")
    slurm_cluster.wait_for(
        lambda: "ok 2" in " ".join(shell(printed[0]).split()), "the status of both runs"
    )
    assert "cancelled 0 jobs" in shell(printed[1])
    assert "| size |" in " ".join(shell(printed[2]).split())
    assert [record.status for record in records(own)] == ["ok", "ok"]
