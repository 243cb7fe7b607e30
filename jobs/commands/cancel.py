"""The command `python -m jobs cancel`: stop queued and running jobs."""

from __future__ import annotations

import os
import signal
import subprocess

from rich.console import Console

from jobs.commands.arguments import Folder
from jobs.commands.find import observed
from jobs.formatting import counted
from jobs.results.manifest import Executor, Manifest
from jobs.submit import fail

console = Console(markup=False, emoji=False)


def cancel(folder: Folder = None) -> None:
    """Cancel all queued and running jobs of a results folder.

    Cancels the jobs of all submissions in the folder. Records of finished runs are kept. To
    continue the sweep, submit it again.
    """
    seen = observed(folder)
    live = {(task.run.id, task.repeat) for task in seen.tasks if task.status.is_live}
    cancelled = 0
    for manifest in seen.manifests:
        states = seen.job_states[manifest.id]
        jobs = [j for j in manifest.jobs if states[j.index].status.is_live and live & set(j.tasks)]
        if not jobs:
            continue
        cancelled += len(jobs)
        if manifest.executor is Executor.slurm:
            ids = [manifest.slurm_ids[job.index] for job in jobs]
            for start in range(0, len(ids), 500):  # command lines have a maximum length
                done = subprocess.run(
                    ["scancel", *ids[start : start + 500]], capture_output=True, text=True
                )
                if done.returncode:
                    fail(f"scancel failed: {done.stderr.strip()}")
        else:
            _stop_process(manifest)
    console.print(f"cancelled {counted(cancelled, 'job')} of {seen.folder}", soft_wrap=True)


def _stop_process(manifest: Manifest) -> None:
    process = manifest.process
    if process is None:
        return
    if not process.is_on_this_host:
        fail(f"submission {manifest.id} runs on host {process.host}; run this command on that host")
    if process.is_running:
        os.kill(process.pid, signal.SIGTERM)
