"""Calls sbatch, which may take minutes, e.g. while the controller has too many jobs."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import IO

from jobs.formatting import on_one_line
from jobs.printing import NOTICE_S, say

POLL_S = 0.05
FINISH_S = 1.5  # time to end after an interrupt, in seconds: usually, sbatch is about to end

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


def sbatch(script: str, environment: dict[str, str], noted: list[int]) -> SbatchResult:
    """Give a script to sbatch, in a file that nobody else can write.

    If there is a signal in `noted`, from `noted_signals`, sbatch is ended after FINISH_S seconds.
    """
    with ExitStack() as files:
        given, out, errors = (files.enter_context(TemporaryFile()) for _ in range(3))
        given.write(script.encode(errors="surrogateescape"))
        given.seek(0)
        process = subprocess.Popen(
            ["sbatch"],
            stdin=given,
            stdout=out,
            stderr=errors,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches only this process
        )
        try:
            _wait(process, errors, noted)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # also what a site's wrapper has started
                process.wait()
        found = re.findall(r"Submitted batch job (\d+)", _text(out))
        number = found[-1] if found and process.returncode == 0 else None
        words = _text(errors).strip() or _text(out).strip()
        refused = process.returncode > 0 and _NO_ANSWER.search(words) is None
        return SbatchResult(number, words, refused)


def _wait(process: subprocess.Popen[bytes], errors: IO[bytes], noted: list[int]) -> None:
    since, told, until = time.monotonic(), False, math.inf
    while process.poll() is None and time.monotonic() < until:
        time.sleep(POLL_S)
        if noted:
            until = min(until, time.monotonic() + FINISH_S)
        if not told and time.monotonic() - since > NOTICE_S:
            told = True
            last = on_one_line(_text(errors))[-200:]
            why = f" ({last})" if last else ""
            say(f"waiting for sbatch{why}; Ctrl-C stops", sys.stderr)


def _text(file: IO[bytes]) -> str:
    """Return the content of a file to which another process may write at this moment."""
    handle = file.fileno()
    return os.pread(handle, os.fstat(handle).st_size, 0).decode(errors="replace")
