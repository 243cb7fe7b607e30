"""The command `cancel`: stop queued and running jobs."""

from __future__ import annotations

import os
import signal
import time

from jobs.block import TaskKey
from jobs.cli.arguments import Folder
from jobs.cli.consoles import console, fail
from jobs.cli.find import observed
from jobs.cli.where import Where, matching
from jobs.formatting import counted, on_one_line
from jobs.printing import waiting_for
from jobs.results.cancelled import add_cancelled
from jobs.results.job_states import job_states
from jobs.results.manifest import Executor, Job, Manifest
from jobs.results.run_states import Observation
from jobs.slurm_client import SlurmSilent, configuration, slurm_client
from jobs.status import Status

EXAMPLES = "logs/flash --where 'dtype == fp16'"

END_S = 60.0  # maximum wait for the end of cancelled jobs, in seconds
POLL_S = 1.0


class CannotCancel(RuntimeError):
    """Raised if jobs of a submission cannot be cancelled. The message is one line."""


def cancel(folder: Folder = None, where: Where = None) -> None:
    """Cancel all queued and running jobs of a results folder.

    Cancels the jobs of all submissions in the folder. Records of finished runs are kept. To
    continue the sweep, submit it again: the command ends when the jobs have ended, or says after a
    minute that they have not. Submissions of other users are never cancelled, and jobs of a cluster
    that does not answer are left alone.

    With --where, cancels only runs that satisfy the condition. A job is cancelled if all of its
    queued and running runs satisfy it. In other jobs, these runs are skipped when their turn comes,
    and a run that executes now is left to end.

    Exit code: 0 if all these jobs were cancelled, 2 if a job cannot be cancelled, for example
    because its queue runs on another host. The other jobs are cancelled.
    """
    seen = observed(folder)
    chosen = matching(seen, where)
    live, picked = _live(seen), _live(chosen)
    executing = {task.key for task in chosen.tasks if task.status is Status.running}
    cancelled = skipped = left = 0
    problems: list[str] = []
    stopped: list[tuple[Manifest, set[int]]] = []
    for manifest in seen.manifests:
        states = seen.job_states[manifest.id]
        jobs = [
            j for j in manifest.jobs if states[j.index].status.is_live and picked & set(j.tasks)
        ]
        silent = [j for j in jobs if states[j.index].status is Status.unknown]
        if silent:
            why = "; ".join(dict.fromkeys(states[job.index].detail for job in silent))
            problems.append(f"{counted(len(silent), 'job')} not cancelled: {why}")
            jobs = [job for job in jobs if job not in silent]
        if jobs and not manifest.is_own:  # its files could name any job or process of this user
            problems.append(f"submission {manifest.id} is of another user, who must cancel it")
            continue
        whole = _whole(manifest, jobs, live, picked)
        inside = {task for job in whole for task in job.tasks}
        shared = {task for job in jobs for task in job.tasks} & picked - inside
        try:
            if where is not None and jobs:
                _note_cancelled(manifest, (inside & picked) | (shared - executing))
            _stop(manifest, whole, all_jobs=where is None)
            if where is None or manifest.executor is not Executor.local:
                stopped.append((manifest, {job.index for job in whole}))
            if where is None and manifest.executor is Executor.slurm:
                # squeue does not show an element of an array that was cancelled before it started.
                _note_cancelled(manifest, (inside & live) - executing)
        except CannotCancel as error:
            problems.append(str(error))
            continue
        cancelled += len(whole)
        skipped += len(shared - executing)
        left += len(shared & executing)
    text = f"cancelled {counted(cancelled, 'job')} of {seen.folder}"
    if skipped:
        text += f"; {counted(skipped, 'run')} of jobs that continue will be skipped"
    if left:
        text += f"; {counted(left, 'executing run')} of jobs that continue left to end"
    if where is not None and not picked:
        text += ": no queued or running run satisfies the condition"
    console.print(text, soft_wrap=True)
    if left_over := _await_end(stopped):
        count = counted(left_over, "job")
        console.print(f"{count} still ending; status shows when, then submit again", soft_wrap=True)
    if problems:
        fail("\n".join(problems))


def _live(seen: Observation) -> set[TaskKey]:
    return {task.key for task in seen.tasks if task.status.is_live}


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


def _note_cancelled(manifest: Manifest, tasks: set[TaskKey]) -> None:
    """Write the runs to the file that the workers and the queue of a submission read."""
    try:
        add_cancelled(manifest.path, tasks)
    except OSError as error:
        raise CannotCancel(
            f"cannot write {error.filename or manifest.path}: {error.strerror}"
        ) from None


def _await_end(stopped: list[tuple[Manifest, set[int]]]) -> int:
    """Wait until cancelled jobs have ended, and return how many have not after END_S seconds.

    A submission right after the command would find jobs that are about to end, and skip their runs.
    """
    deadline = time.monotonic() + END_S
    with waiting_for("the cancelled jobs to end; a submission before that skips their runs"):
        while True:
            states = job_states([manifest for manifest, jobs in stopped if jobs], [])
            alive = sum(
                states[manifest.id][job].status.is_live
                for manifest, jobs in stopped
                for job in jobs
            )
            if not alive or time.monotonic() > deadline:
                return alive
            time.sleep(POLL_S)


def _stop(manifest: Manifest, jobs: list[Job], all_jobs: bool) -> None:
    """Stop jobs of a submission.

    If these are all live jobs of the folder (`all_jobs`), a local queue is stopped as a whole.
    Otherwise it reads from the list of cancelled runs which jobs it stops.

    Raises:
        CannotCancel: if Slurm does not answer or refuses, or if the queue cannot be stopped.
    """
    if not jobs:
        return
    if manifest.executor is Executor.slurm:
        cluster = manifest.slurm_jobs[jobs[0].index].cluster
        _scancel(cluster, [manifest.slurm_ids[job.index] for job in jobs])
    elif all_jobs or manifest.executor is Executor.debug:
        _stop_process(manifest)


def _scancel(cluster: str, ids: list[str]) -> None:
    try:
        remote = "" if cluster in ("", configuration().get("ClusterName")) else cluster
        for start in range(0, len(ids), 500):  # command lines have a maximum length
            done = slurm_client("scancel", *ids[start : start + 500], cluster=remote)
            if done.returncode:
                raise CannotCancel(f"scancel failed: {on_one_line(done.stderr)}")
    except SlurmSilent as error:
        raise CannotCancel(str(error)) from None


def _stop_process(manifest: Manifest) -> None:
    process = manifest.process
    if process is None:
        return
    if not process.is_on_this_host:
        raise CannotCancel(
            f"submission {manifest.id} runs on host {process.host}; run this command on that host"
        )
    if process.is_running:
        try:
            os.kill(process.pid, signal.SIGTERM)
        except ProcessLookupError:  # it has just ended
            return
        except OSError as error:
            raise CannotCancel(f"cannot stop process {process.pid}: {error.strerror}") from None
