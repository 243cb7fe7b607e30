"""The command `python -m jobs logs`: the output of one run."""

from __future__ import annotations

import sys
from pathlib import Path

from jobs.commands.arguments import In, RunId
from jobs.commands.find import find_run
from jobs.results.manifest import ARTIFACTS, SUBMISSIONS
from jobs.results.run_states import Observation, TaskState


def logs(run: RunId, folder: In = None) -> None:
    """Print the output of a run and, if the run failed, the reason.

    Shows the latest attempt. If the run has several repeats, shows a repeat that failed if there is
    one, otherwise the repeat that finished last. If the run is in several folders, the folder of
    the last submission is preferred. If the run has no log file, prints the output of its job.
    """
    seen, task = find_run(run, folder)
    record = task.record
    print(f"# {task.run.label()} -> {task.status} {task.detail}".rstrip())
    failure = record.failure if record is not None else None
    if failure is not None:
        print(f"# {failure.type}: {failure.message}")
    for left in sorted((seen.folder / ARTIFACTS).glob(f"{task.run.id}-{task.repeat}-*")):
        print(f"# artifacts in {left}")
    paths = sorted(
        seen.folder.glob(f"{SUBMISSIONS}/*/jobs/*/{task.run.id}-{task.repeat}-*.log"),
        key=lambda path: path.stat().st_mtime,
    )
    shown = seen.folder / record.log if record is not None and record.log else None
    if shown is None or not shown.exists():
        shown = paths[-1] if paths else None
    if shown is not None:
        print(f"# {shown}")
        text = shown.read_text(errors="replace")
        sys.stdout.write(text)
        if failure is not None and failure.traceback and failure.traceback not in text:
            print(f"# traceback:\n{failure.traceback}")  # a hang logs no traceback
    else:
        for path in _job_logs(seen, task):
            print(f"# the run has no log file; this is the output of its job, {path}:")
            sys.stdout.write(path.read_text(errors="replace"))


def _job_logs(seen: Observation, task: TaskState) -> list[Path]:
    """Return the log files of the newest job that contains a run. Empty files are left out.

    Args:
        seen: states of all runs in a results folder.
        task: state of the run.
    """
    for manifest in reversed(seen.manifests):
        for job in manifest.jobs:
            if (task.run.id, task.repeat) in job.tasks:
                job_id = manifest.slurm_ids.get(job.index, "-")
                found = sorted((manifest.path / "slurm").glob(f"{job_id}_*log.*"))
                found += [p for p in [manifest.job_folder(job.index) / "worker.log"] if p.exists()]
                return [p for p in found if p.stat().st_size]
    return []
