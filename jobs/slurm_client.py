"""Calls of Slurm's client commands, such as squeue, with a time limit."""

from __future__ import annotations

import os
import subprocess

CLIENT_S = 15.0  # time limit of one command, in seconds; Slurm's own limit is about a minute


class SlurmSilent(RuntimeError):
    """Raised if a client command of Slurm is missing or does not answer in time."""


def slurm_client(*command: str, timeout_s: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run a client command of Slurm, and return its output and exit code.

    The command must not submit a job: a job whose sbatch was ended by the time limit may be in the
    queue without a known id. The limit is CLIENT_S by default.

    Raises:
        SlurmSilent: if the program is missing, or if it does not end within the time limit.
    """
    tried = " ".join(command[:3])
    limit = CLIENT_S if timeout_s is None else timeout_s
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=limit
        )
    except subprocess.TimeoutExpired:
        given = os.environ.get("SLURM_CONF")
        source = f"SLURM_CONF={given}" if given else "the default configuration"
        raise SlurmSilent(
            f"Slurm does not answer: '{tried}' did not end within {limit:.0f} s (with {source})"
        ) from None
    except OSError as error:
        raise SlurmSilent(
            f"Slurm does not answer: cannot run '{tried}': {error.strerror}"
        ) from None
