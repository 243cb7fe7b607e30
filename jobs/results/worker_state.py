"""Writes and reads `state.json`, which says which run a worker is executing.

A worker is a process that executes the runs of a job, one after another. The file is in the folder
of the job. The command `jobs status` reads the file. If a worker dies, the next worker of the same
job also reads the file.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from jobs.json_files import write_json

STATE = "state.json"  # file in the folder of a job


class RunningAttempt(BaseModel):
    """The attempt that a worker process is executing. An attempt is one execution of a run."""

    model_config = ConfigDict(frozen=True)

    run: str
    repeat: int
    attempt: int
    started_at: float | None = None  # in seconds since the epoch


class WorkerState(BaseModel):
    model_config = ConfigDict(frozen=True)

    running: RunningAttempt | None = None
    # Number of workers that died during a run without writing a record, by "run/repeat".
    deaths: dict[str, int] = {}
    pid: int | None = None
    host: str | None = None
    at: float | None = None  # time of writing, in seconds since the epoch


def write_worker_state(job_folder: Path, state: WorkerState) -> None:
    write_json(job_folder / STATE, state.model_dump(mode="json"))


def read_worker_state(job_folder: Path) -> WorkerState:
    """Return the last state that a worker of the job wrote.

    If there is no readable state, return an empty state.
    """
    try:
        return WorkerState.model_validate_json((job_folder / STATE).read_text())
    except (OSError, ValueError):
        return WorkerState()
