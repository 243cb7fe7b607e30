"""Calls of Slurm's client commands, such as squeue, with a time limit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time

from jobs.errors import CommandError
from jobs.printing import waiting_for

CLIENT_S = 15.0  # time limit of one command, in seconds
PING_S = 3.0  # time in which the controller must say that it is up, in seconds
REMEMBER_S = 1.0  # time for which the answer to a ping counts, in seconds
# Variables of a job, and settings of the user that change what client commands do or print
SLURM_VARIABLE = re.compile(
    r"(?!SLURM_CONF$)(SLURM|SLURMD|SBATCH|SRUN|SALLOC|SQUEUE|SCANCEL|SCONTROL)_"
)
# By cluster, configuration and program: what a ping said, and until when that counts.
_pings: dict[tuple[str | None, ...], tuple[float, str]] = {}


class SlurmSilent(CommandError):
    """Raised if a client command of Slurm is missing, fails or does not answer in time."""


def slurm_client(
    *command: str, cluster: str = "", timeout_s: float | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a client command of Slurm for `cluster` ("": that of this host), with a time limit.

    The command must not submit a job, because it may be ended. Without an explicit limit, the
    controller must first answer a ping: if it is down, other commands try for about ten seconds.

    Raises:
        SlurmSilent: if the program is missing, the controller is down, or the limit is reached.
    """
    with waiting_for("Slurm's controller to answer"):
        if timeout_s is None:
            _ping(cluster)
        return _run(command, cluster, CLIENT_S if timeout_s is None else timeout_s)


def _ping(cluster: str) -> None:
    which = cluster, os.environ.get("SLURM_CONF"), shutil.which("scontrol")
    until, problem = _pings.get(which, (0.0, ""))
    if time.monotonic() > until:
        problem = ""
        if which[-1] is not None:
            try:
                said = _run(("scontrol", "ping"), cluster, PING_S).stdout
                down = re.search(r".* is DOWN", said)
                if down and " is UP" not in said:  # one of several controllers is enough
                    problem = f"Slurm does not answer: {down[0]}"
            except SlurmSilent as error:
                problem = str(error)
        _pings[which] = time.monotonic() + REMEMBER_S, problem
    if problem:
        raise SlurmSilent(problem)


def _run(command: tuple[str, ...], cluster: str, limit: float) -> subprocess.CompletedProcess[str]:
    program, *arguments = command
    given = [program, *(["-M", cluster] if cluster else []), *arguments]
    tried = " ".join(given[:3])
    environment = {k: v for k, v in os.environ.items() if not SLURM_VARIABLE.match(k)}
    try:
        return subprocess.run(
            given,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        conf = os.environ.get("SLURM_CONF")
        source = f"SLURM_CONF={conf}" if conf else "the default configuration"
        raise SlurmSilent(
            f"Slurm does not answer: '{tried}' did not end within {limit:.0f} s (with {source})"
        ) from None
    except OSError as error:
        raise SlurmSilent(
            f"Slurm does not answer: cannot run '{tried}': {error.strerror}"
        ) from None


def configuration(cluster: str = "") -> dict[str, str]:
    """Return what `scontrol show config` prints, such as ClusterName. Empty if a site hides it."""
    done = slurm_client("scontrol", "show", "config", cluster=cluster)
    found = dict(re.findall(r"^(\w+)\s*= (.*?)\s*$", done.stdout, re.MULTILINE))
    if done.returncode and not found and "denied" not in done.stderr:
        why = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise SlurmSilent(f"Slurm does not answer: 'scontrol show config' failed: {why[-1]}")
    return found
