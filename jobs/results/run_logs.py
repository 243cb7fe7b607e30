"""Finds the log files of a run, and those of the job that contains it."""

from __future__ import annotations

import os
from pathlib import Path

from jobs.results.counting import is_trial, tried
from jobs.results.run_states import Observation, TaskState


def logs_of(seen: Observation, task: TaskState) -> list[Path]:
    """Return the log files of a run on all nodes, in all submissions."""
    key = task.key
    folders = (
        m.job_folder(job.index) for m in seen.manifests for job in m.jobs if key in job.tasks
    )
    return [path for one in folders for path in sorted(one.glob(f"{key[0]}-{key[1]}-*.log"))]


def latest_logs(seen: Observation, task: TaskState) -> list[Path]:
    """Return the log files of the attempt that `log_of` shows, one for each node."""

    def attempt(log: Path) -> tuple[Path, int]:  # of a submission, which counts its own attempts
        return log.parent, attempt_of(log)

    shown = log_of(seen, task)
    logs = logs_of(seen, task)
    return [path for path in logs if shown is not None and attempt(path) == attempt(shown)]


def attempt_of(log: Path) -> int:
    return int(log.name.split("-")[2].split(".")[0])  # <run>-<repeat>-<attempt>[.node<rank>].log


def log_of(seen: Observation, task: TaskState) -> Path | None:
    """Return the log file of a run: that of its recorded attempt, or the newest without a record.

    A log of another attempt would explain a failure that is not the one shown. A run that was not
    executed again has the log of its trial.
    """
    logs = logs_of(seen, task)
    record = task.outcome
    if record is not None and record.block is not None and record.log is None:
        trials = (r for r in seen.records if is_trial(r) and tried(r) == tried(record))
        record = max(trials, key=lambda trial: trial.finished_at, default=record)
    if record is not None:
        if record.log and (seen.folder / record.log).exists():
            return seen.folder / record.log
        logs = [path for path in logs if attempt_of(path) == record.attempt]
    return max(logs, key=lambda path: path.lstat().st_mtime, default=None)


def job_logs(seen: Observation, task: TaskState) -> list[Path]:
    """Return the log files of the newest job that contains a run. Empty files are left out."""
    for manifest in reversed(seen.manifests):
        for job in manifest.jobs:
            if task.key in job.tasks:
                job_id = manifest.slurm_ids.get(job.index, "-")
                found = sorted((manifest.path / "slurm").glob(f"{job_id}_*log.*"))
                found.append(manifest.job_folder(job.index) / "worker.log")
                return [path for path in found if os.path.isfile(path) and os.path.getsize(path)]
    return []


def text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        return f"# {path} cannot be read: {error.strerror}\n"
