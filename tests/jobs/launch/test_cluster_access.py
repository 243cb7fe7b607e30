"""Who can use the Slurm cluster of the tests: whoever can, may say to be root."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs.launch.slurm_cluster import SlurmCluster, listens_on_loopback

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
    jobs = slurm_cluster.client("squeue", "-h", "--states=all", f"--user={NOBODY}")
    assert (jobs.returncode, jobs.stdout) == (0, "")
    assert not (folder_of_all / "ran").exists()


def test_another_user_cannot_authenticate(slurm_cluster: SlurmCluster, folder_of_all: Path) -> None:
    munge = slurm_cluster.folder / "munge"
    assert munge.stat().st_mode & 0o777 == 0o700
    assert (munge / "key").stat().st_mode & 0o777 == 0o600
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
        assert srun.stdout and srun.stdout.readline() == b"started\n"
        listening = listening_sockets(slurm_cluster)
    assert {program for program, _ in listening} >= {"slurmctld", "slurmd", "srun"}
    assert [one for one in listening if not ipaddress.ip_address(one[1]).is_loopback] == []


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


def listening_sockets(cluster: SlurmCluster) -> set[tuple[str, str]]:
    """Return the program and the IPv4 address of each TCP socket on which Slurm listens."""
    address_of = {}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_, inode = line.split()[:10]
        if state == "0A":  # listening
            number = int(local.partition(":")[0], 16)
            address = ipaddress.ip_address(number.to_bytes(4, sys.byteorder))
            address_of[f"socket:[{inode}]"] = str(address)
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has ended
            variables = (process / "environ").read_bytes().split(b"\0")
            program = (process / "exe").readlink().name.removesuffix("-wlm")  # Debian's suffix
            if (
                f"SLURM_CONF={cluster.folder}/slurm.conf".encode() in variables
                and program.startswith(("slurm", "srun"))
            ):
                files = {str(file.readlink()) for file in (process / "fd").iterdir()}
                found |= {(program, address_of[file]) for file in files & address_of.keys()}
    return found
