"""What a worker is doing now: `state.json` in its job's folder.

`status` shows it. The next worker of the job learns from it what the last was executing, should
that have died.
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
    started_at: float | None = None  # since the epoch


class WorkerState(BaseModel):
    model_config = ConfigDict(frozen=True)

    running: RunningAttempt | None = None
    deaths: dict[str, int] = {}  # by "run/repeat", workers that ended without a word during it
    pid: int | None = None
    host: str | None = None
    at: float | None = None  # since the epoch


def write_worker_state(job_folder: Path, state: WorkerState) -> None:
    write_json(job_folder / "state.json", state.model_dump(mode="json"))


def read_worker_state(job_folder: Path) -> WorkerState:
    """The last that a job's worker wrote; nothing where none has written."""
    try:
        return WorkerState.model_validate_json((job_folder / "state.json").read_text())
    except (OSError, ValueError):
        return WorkerState()
