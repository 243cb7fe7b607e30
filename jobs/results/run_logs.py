"""Finds the log files of a run, and those of the job that contains it."""

from __future__ import annotations

import os
from pathlib import Path

from jobs.results.counting import is_trial, tried
from jobs.results.run_states import Observation, TaskState


def log_of(seen: Observation, task: TaskState) -> Path | None:
    """Return the log file of a run: that of its recorded attempt, or the newest without a record.

    A log of another attempt would explain a failure that is not the one shown. A run that was not
    executed again has the log of its trial.
    """
    record = task.outcome
    if record is not None and record.block is not None and record.log is None:
        trials = (r for r in seen.records if is_trial(r) and tried(r) == tried(record))
        record = max(trials, key=lambda trial: trial.finished_at, default=record)
    if record is not None and record.log and (seen.folder / record.log).exists():
        return seen.folder / record.log
    attempt = "*" if record is None else record.attempt
    name = f"{task.run.id}-{task.repeat}-{attempt}.*log"  # on other nodes, it ends in .node1.log
    folders = (
        m.job_folder(job.index) for m in seen.manifests for job in m.jobs if task.key in job.tasks
    )
    logs = (path for folder in folders for path in sorted(folder.glob(name)))
    return max(logs, key=lambda path: path.lstat().st_mtime, default=None)


def on_all_nodes(log: Path) -> list[Path]:
    """Return the log files of the attempt that wrote one, one for each node."""
    return sorted(log.parent.glob(f"{log.name.partition('.')[0]}.*log"))


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
