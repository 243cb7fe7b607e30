"""Slurm jobs that run another interpreter, through programs that act as containers."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.launch.slurm_cluster import SlurmCluster
from tests.jobs.launch.slurm_scenario import (
    Scenarios,
)

pytestmark = pytest.mark.slurm

APPTAINER = """\
#!/bin/sh
# Does what `apptainer exec --nv IMAGE COMMAND` does, without a container.
[ "$1 $2 $3" = "exec --nv image.sif" ] || { echo "FATAL:   unexpected: $*" >&2; exit 255; }
shift 3
cd /
CONTAINER=apptainer exec "$@"
"""
SRUN = """\
#!/bin/bash
# Does what the options of pyxis do, without a container.
options=()
for option; do
  case $option in
    --container-image=*) export CONTAINER=${option#*=} ;;
    *) options+=("$option") ;;
  esac
done
exec %s "${options[@]}"
"""


@pytest.fixture(scope="module")
def scenarios(slurm_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Scenarios:
    scenarios = Scenarios(slurm_cluster, tmp_path_factory.mktemp("containers"))
    folder = scenarios.folder / "image"
    python = install_interpreter(folder)
    programs = folder / "programs"
    programs.mkdir()
    for name, text in (("apptainer", APPTAINER), ("srun", SRUN % shutil.which("srun"))):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    apptainer = f"apptainer exec --nv image.sif {shlex.quote(str(python))}"
    pyxis = {"python": shlex.quote(str(python)), "srun_args": ["--container-image=lab/torch:2"]}
    settings: dict[str, dict[str, Any]] = {
        "apptainer": {"python": apptainer},
        "pyxis": pyxis,
        "wrong_image": {"python": apptainer.replace("image", "other")},
        "wrong_python": {"python": "/nowhere/python"},
    }
    for name, slurm in settings.items():
        scenario = scenarios.new(name, grid={"index": [0]}, slurm=slurm)
        done = scenario.submit_alone(PATH=path)
        assert done.returncode == 0, done.stdout
    return scenarios


def install_interpreter(folder: Path) -> Path:
    """Make a virtual environment with the packages of this one, and return its interpreter."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    for name in ("pyvenv.cfg", "lib"):
        (folder / name).symlink_to(Path(sys.prefix) / name)
    return folder / "bin" / "python"


@pytest.mark.slow
def test_other_interpreter(scenarios: Scenarios) -> None:
    """All processes of a job use the interpreter in the container."""
    python = str(scenarios.folder / "image" / "bin" / "python")
    for name, container in (("apptainer", "apptainer"), ("pyxis", "lab/torch:2")):
        (record,) = scenarios[name].finish()
        assert record.measurements is not None, record.failure
        facts = record.measurements.facts
        assert (facts["environment"]["CONTAINER"], facts["executable"]) == (container, python)
        assert facts["folder"] == str(scenarios[name].folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("wrong_image", "FATAL:   unexpected: exec --nv other.sif"),
        ("wrong_python", "/nowhere/python: No such file or directory"),
    ],
)
def test_interpreter_that_does_not_start(scenarios: Scenarios, name: str, reason: str) -> None:
    scenario = scenarios[name]
    assert scenario.finish() == []
    (task,) = scenario.status()["tasks"]
    assert task["state"] == "killed" and reason in task["detail"]
