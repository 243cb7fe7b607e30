"""Current state of a worker: `state.json` in the folder of its job.

`jobs status` reads there which run is executing. If the worker dies, the next worker of the job
reads there which run was executing.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from jobs.json_files import write_json


class RunningAttempt(BaseModel):
    """The attempt that a worker is executing."""

    model_config = ConfigDict(frozen=True)

    run: str
    repeat: int
    attempt: int
    started_at: float | None = None  # in seconds since the epoch


class WorkerState(BaseModel):
    model_config = ConfigDict(frozen=True)

    running: RunningAttempt | None = None
    deaths: dict[str, int] = {}  # by "run/repeat": workers that died during it without a record
    pid: int | None = None
    host: str | None = None
    at: float | None = None  # when the state was written, in seconds since the epoch


def write_worker_state(job_folder: Path, state: WorkerState) -> None:
    write_json(job_folder / "state.json", state.model_dump(mode="json"))


def read_worker_state(job_folder: Path) -> WorkerState:
    """Return the state that the job's worker wrote last, or an empty state if there is none."""
    try:
        return WorkerState.model_validate_json((job_folder / "state.json").read_text())
    except (OSError, ValueError):
        return WorkerState()
