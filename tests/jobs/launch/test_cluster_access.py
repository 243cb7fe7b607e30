"""Who can use the Slurm cluster of the tests: whoever can, may say to be root."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.jobs.launch.slurm_cluster import SlurmCluster, listens_on_loopback
from tests.jobs.open_ports import is_loopback, listening

pytestmark = pytest.mark.slurm

NOBODY = 65534


def test_another_user_cannot_run_a_job(slurm_cluster: SlurmCluster, folder_of_all: Path) -> None:
    folder_of_all.chmod(0o777)
    configuration = (slurm_cluster.folder / "slurm.conf").read_text()
    without = re.sub("(auth|cred)/munge", r"\1/none", configuration)
    (folder_of_all / "slurm.conf").write_text(without)
    refused = as_nobody(folder_of_all, "srun", "touch", "ran")
    assert refused.returncode != 0
    assert "Unable to allocate resources" in refused.stderr and "contact" not in refused.stderr
    assert not (folder_of_all / "ran").exists()
    munge = slurm_cluster.folder / "munge"
    for command in (["cat", munge / "key"], ["munge", "--no-input", "--socket", munge / "socket"]):
        denied = as_nobody(folder_of_all, *command)
        assert denied.returncode != 0 and "Permission denied" in denied.stderr


def test_slurm_listens_on_loopback_only(slurm_cluster: SlurmCluster) -> None:
    if not listens_on_loopback():
        pytest.skip("the name of this machine has another address than 127.0.0.1")
    command = ["srun", "sh", "-c", "echo started; cat"]
    environment = os.environ | slurm_cluster.environment
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe) as srun:
        assert srun.stdout.readline() == b"started\n"
        pids = [os.getpid(), *slurm_cluster.step_pids()]  # the daemons are children of this process
        found = {one for pid in pids for one in listening(pid)}
    assert len(found) > 1 + len(slurm_cluster.nodes)  # slurmctld, each slurmd, and srun
    assert all(is_loopback(address) for address, _ in found)


def as_nobody(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"SLURM_CONF": str(folder / "slurm.conf")},
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        capture_output=True,
        text=True,
    )
