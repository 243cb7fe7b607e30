"""Cancel queued and running jobs of a results folder."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field

from jobs.errors import CommandError
from jobs.formatting import counted, on_one_line
from jobs.printing import waiting_for
from jobs.results.job_states import job_states
from jobs.results.manifest import Executor, Job, Manifest
from jobs.results.run_states import Observation
from jobs.slurm_client import configuration, slurm_client
from jobs.status import Status

END_S = 60.0  # maximum wait for the end of cancelled jobs, in seconds
POLL_S = 1.0


@dataclass
class Cancelled:
    """What was cancelled, and what was not."""

    problems: list[str] = field(default_factory=list)  # one line each
    stopped: list[tuple[Manifest, list[Job]]] = field(default_factory=list)


def cancel(seen: Observation) -> Cancelled:
    """Cancel queued and running jobs of a results folder, except those of other users."""
    live = {task.key for task in seen.tasks if task.status.is_live}
    done = Cancelled()
    for manifest in seen.manifests:
        states = seen.job_states[manifest.id]
        jobs = [j for j in manifest.jobs if states[j.index].status.is_live and live & set(j.tasks)]
        silent = [j for j in jobs if states[j.index].status is Status.unknown]
        if silent:
            why = "; ".join(dict.fromkeys(states[job.index].detail for job in silent))
            done.problems.append(f"{counted(len(silent), 'job')} not cancelled: {why}")
            jobs = [job for job in jobs if job not in silent]
        if not jobs:
            continue
        if not manifest.is_own:  # its files could name any job or process of this user
            done.problems.append(f"submission {manifest.id} is of another user, who must cancel it")
            continue
        try:
            if manifest.executor is Executor.slurm:
                _scancel(manifest, jobs)
            else:
                _stop_process(manifest)
        except (CommandError, OSError) as error:
            where = f"{manifest.path}: " if isinstance(error, OSError) else ""
            done.problems.append(f"{where}{error}")
            continue
        done.stopped.append((manifest, jobs))
    return done


def await_end(done: Cancelled) -> int:
    """Wait until cancelled jobs have ended, and return how many have not after END_S seconds."""
    deadline = time.monotonic() + END_S
    with waiting_for("the cancelled jobs to end; a submission before that skips their runs"):
        while True:
            states = job_states([manifest for manifest, _ in done.stopped], [])
            alive = sum(
                states[manifest.id][job.index].status.is_live
                for manifest, jobs in done.stopped
                for job in jobs
            )
            if not alive or time.monotonic() > deadline:
                return alive
            time.sleep(POLL_S)


def _scancel(manifest: Manifest, jobs: list[Job]) -> None:
    known = manifest.slurm_ids
    ids = [known[job.index] for job in jobs]
    cluster = manifest.slurm_jobs[jobs[0].index].cluster
    remote = "" if cluster in ("", configuration().get("ClusterName")) else cluster
    for start in range(0, len(ids), 500):  # command lines have a maximum length
        done = slurm_client("scancel", *ids[start : start + 500], cluster=remote)
        if done.returncode:
            raise CommandError(f"scancel failed: {on_one_line(done.stderr)}")


def _stop_process(manifest: Manifest) -> None:
    process = manifest.process
    if process is None:
        return
    if not process.is_on_this_host:
        raise CommandError(
            f"submission {manifest.id} runs on host {process.host}; run this command on that host, "
            "and in the same container"
        )
    if process.is_running:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(process.pid, signal.SIGTERM)
