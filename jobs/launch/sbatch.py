"""Calls sbatch, which may take minutes, e.g. while the controller has too many jobs."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO

from jobs.printing import waiting_for

# What sbatch prints if the controller has not answered it, or nothing, if it was killed.
_NO_ANSWER = re.compile(
    r"timed out|zero bytes|unexpected message|(receive|shutdown) failure|reset by peer|^$",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class SbatchResult:
    """How a call of sbatch ended."""

    number: str | None  # number of the job or array, if sbatch says that Slurm has accepted it
    words: str  # what sbatch printed
    refused: bool  # whether Slurm has refused the job; if not, it may accept it even without number


def sbatch(script: str, environment: dict[str, str]) -> SbatchResult:
    """Give a script to sbatch in a pipe, to which nobody else can write, and wait for its answer.

    Call it in `noted_signals`: only the answer tells whether Slurm has accepted the job.
    """
    with (
        TemporaryFile() as out,  # a pipe would wait for all that a site's wrapper has started
        TemporaryFile() as errors,
        waiting_for("sbatch", "Ctrl-C stops after its answer"),
    ):
        done = subprocess.run(
            ["sbatch"],
            input=script.encode(errors="surrogateescape"),
            stdout=out,
            stderr=errors,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches only this process
        )
        told = _text(out)
        words = _text(errors).strip() or told.strip()
    found = re.findall(r"Submitted batch job (\d+)", told)
    number = found[-1] if found and done.returncode == 0 else None
    refused = done.returncode > 0 and _NO_ANSWER.search(words) is None
    return SbatchResult(number, words, refused)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
