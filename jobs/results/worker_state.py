"""Files in the folder of a job that say what its worker does, and how it ended.

state.json        the run that the worker executes, and how often workers died in one
worker_end.json   how the worker died, if the local queue did not start another one
worker            token of the worker that started last, see `claim_job`
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter

from jobs.processes import signal_name
from jobs.results.unreadable import BadLine, read_json
from jobs.whole_files import write_json

STATE = "state.json"  # file in the folder of a job
WORKER = "worker"
END = "worker_end.json"
IDLE_RESTARTS = 2  # restarts in a row of a worker that dies without progress


class RunningAttempt(BaseModel):
    """The attempt that a worker process is executing."""

    model_config = ConfigDict(frozen=True)

    run: str
    repeat: int
    attempt: int


class WorkerState(BaseModel):
    model_config = ConfigDict(frozen=True)

    running: RunningAttempt | None = None
    # Number of workers that died during a run without writing a record, by "run/repeat".
    deaths: dict[str, int] = {}


class WorkerEnd(BaseModel):
    """How a worker of the local queue died."""

    model_config = ConfigDict(frozen=True)

    pid: int
    exit_code: int  # if negative, the number of the signal that killed the worker
    at: float  # in seconds since the epoch

    def text(self, job: int) -> str:
        killed = f"was killed by {signal_name(-self.exit_code)}"
        how = killed if self.exit_code < 0 else f"ended with exit code {self.exit_code}"
        return f"the worker (process {self.pid}) of job {job} {how}"


_STATE, _END = TypeAdapter(WorkerState), TypeAdapter(WorkerEnd)


def write_worker_state(job_folder: Path, state: WorkerState) -> None:
    write_json(job_folder / STATE, state.model_dump(mode="json"))


def write_worker_end(job_folder: Path, end: WorkerEnd) -> None:
    write_json(job_folder / END, end.model_dump(mode="json"))


def read_worker_state(job_folder: Path, bad: list[BadLine] | None = None) -> WorkerState:
    """Return the last state that a worker of the job wrote, or an empty one."""
    return read_json(job_folder / STATE, _STATE, bad) or WorkerState()


def read_worker_end(job_folder: Path, bad: list[BadLine]) -> WorkerEnd | None:
    """Return how the last worker of a job died, or None if no file says that it did."""
    return read_json(job_folder / END, _END, bad)


def claim_job(job_folder: Path) -> str:
    """Note that a new worker of a job has started, and return its token.

    Slurm starts a job again if its node is lost. If the node was only unreachable, the old worker
    still runs. It ends when it finds the token of the new one.
    """
    token = os.urandom(8).hex()
    with suppress(OSError):  # a full disk: then both write records, as attempts of their own
        write_json(job_folder / WORKER, token)
    return token


def is_claimed_by(job_folder: Path, token: str) -> bool:
    """Return whether no other worker has started since `claim_job` returned the token."""
    try:
        return str(json.loads((job_folder / WORKER).read_text())) == token
    except (OSError, ValueError):
        return True
