"""Cancel queued and running jobs of a results folder."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field

from jobs.block import TaskKey
from jobs.errors import CommandError
from jobs.formatting import counted, on_one_line
from jobs.printing import waiting_for
from jobs.results.cancelled import add_cancelled
from jobs.results.job_states import job_states
from jobs.results.manifest import Executor, Job, Manifest
from jobs.results.run_states import Observation, TaskState
from jobs.slurm_client import configuration, slurm_client
from jobs.status import Status

END_S = 60.0  # maximum wait for the end of cancelled jobs, in seconds
POLL_S = 1.0


@dataclass
class Cancelled:
    """What was cancelled, and what was not."""

    jobs: int = 0
    skipped: int = 0  # runs of jobs that continue, which will not be executed
    left: int = 0  # executing runs of jobs that continue
    problems: list[str] = field(default_factory=list)  # one line each
    stopped: list[tuple[Manifest, set[int]]] = field(default_factory=list)  # whose end is awaited


def cancel(seen: Observation, chosen: list[TaskState] | None) -> Cancelled:
    """Cancel queued and running jobs of a results folder, except those of other users.

    A job is cancelled if all of its queued and running runs are `chosen` (None: all are). In other
    jobs, chosen runs are skipped when their turn comes.
    """
    live = {task.key for task in seen.tasks if task.status.is_live}
    picked = live if chosen is None else live & {task.key for task in chosen}
    executing = {task.key for task in seen.tasks if task.status is Status.running}
    done = Cancelled()
    for manifest in seen.manifests:
        states = seen.job_states[manifest.id]
        jobs = [
            j for j in manifest.jobs if states[j.index].status.is_live and picked & set(j.tasks)
        ]
        silent = [j for j in jobs if states[j.index].status is Status.unknown]
        if silent:
            why = "; ".join(dict.fromkeys(states[job.index].detail for job in silent))
            done.problems.append(f"{counted(len(silent), 'job')} not cancelled: {why}")
            jobs = [job for job in jobs if job not in silent]
        if jobs and not manifest.is_own:  # its files could name any job or process of this user
            done.problems.append(f"submission {manifest.id} is of another user, who must cancel it")
            continue
        whole = _whole(manifest, jobs, live, picked)
        inside = {task for job in whole for task in job.tasks}
        shared = {task for job in jobs for task in job.tasks} & picked - inside
        try:
            if chosen is not None and jobs:
                add_cancelled(manifest.path, (inside & picked) | (shared - executing))
            _stop(manifest, whole, all_jobs=chosen is None)
            if chosen is None or manifest.executor is not Executor.local:
                done.stopped.append((manifest, {job.index for job in whole}))
            if chosen is None and manifest.executor is Executor.slurm:
                # squeue does not show an element of an array that was cancelled before it started.
                add_cancelled(manifest.path, (inside & live) - executing)
        except (CommandError, OSError) as error:
            where = f"{manifest.path}: " if isinstance(error, OSError) else ""
            done.problems.append(f"{where}{error}")
            continue
        done.jobs += len(whole)
        done.skipped += len(shared - executing)
        done.left += len(shared & executing)
    return done


def await_end(done: Cancelled) -> int:
    """Wait until cancelled jobs have ended, and return how many have not after END_S seconds."""
    deadline = time.monotonic() + END_S
    with waiting_for("the cancelled jobs to end; a submission before that skips their runs"):
        while True:
            states = job_states([manifest for manifest, jobs in done.stopped if jobs], [])
            alive = sum(
                states[manifest.id][job].status.is_live
                for manifest, jobs in done.stopped
                for job in jobs
            )
            if not alive or time.monotonic() > deadline:
                return alive
            time.sleep(POLL_S)


def _whole(
    manifest: Manifest, jobs: list[Job], live: set[TaskKey], picked: set[TaskKey]
) -> list[Job]:
    """Return the jobs of which all queued and running runs are picked.

    The jobs of a debug submission share a process, so all or none of them are returned.
    """
    if manifest.executor is Executor.debug:
        every = {task for job in manifest.jobs for task in job.tasks}
        return jobs if live & every <= picked else []
    return [job for job in jobs if live & set(job.tasks) <= picked]


def _stop(manifest: Manifest, jobs: list[Job], all_jobs: bool) -> None:
    """Stop jobs of a submission.

    If these are all live jobs of the folder (`all_jobs`), a local queue is stopped as a whole.
    Otherwise it reads from the list of cancelled runs which jobs it stops.
    """
    if jobs and manifest.executor is Executor.slurm:
        _scancel(manifest, jobs)
    elif jobs and (all_jobs or manifest.executor is Executor.debug):
        _stop_process(manifest)


def _scancel(manifest: Manifest, jobs: list[Job]) -> None:
    ids = [manifest.slurm_ids[job.index] for job in jobs]
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
            f"submission {manifest.id} runs on host {process.host}; run this command on that host"
        )
    try:
        if process.is_running:
            os.kill(process.pid, signal.SIGTERM)
    except ProcessLookupError:  # it has just ended
        pass
