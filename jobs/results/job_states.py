"""Determines the states of jobs, from Slurm or from the local process that runs the jobs."""

from __future__ import annotations

import time

from jobs.processes import ProcessHandle
from jobs.results.heartbeat import DEAD_S, silence_s
from jobs.results.manifest import Executor, Manifest
from jobs.results.slurm_job_states import slurm_job_states
from jobs.status import JobState, JobStates, Status

# Age from which a submission on another host without a heartbeat counts as ended, in seconds.
UNKNOWN_S = 86400.0


def job_states(manifests: list[Manifest], notes: list[str]) -> JobStates:
    """Return the state of every job of submissions, by submission id and job index.

    Problems, such as that Slurm does not answer, are added to `notes`.
    """
    slurm = [manifest for manifest in manifests if manifest.executor is Executor.slurm]
    states = {m.id: _local_states(m) for m in manifests if m.executor is not Executor.slurm}
    if slurm:
        states |= slurm_job_states(slurm, notes)
    return states


def _local_states(manifest: Manifest) -> dict[int, JobState]:
    process = manifest.process
    if process is None:
        state = JobState(Status.missing, "the submission never started its jobs; submit again")
    elif not process.ended and not process.interrupted and not process.is_on_this_host:
        state = _state_elsewhere(manifest, process)
    elif not process.ended and process.is_on_this_host and process.is_running:
        state = JobState(Status.running, f"the submission runs in process {process.pid}")
    elif process.interrupted:
        state = JobState(Status.cancelled, "the submission was interrupted; submit again")
    else:
        where = "" if process.is_on_this_host else f" on {process.host}"
        state = JobState(
            Status.killed,
            f"process {process.pid}{where}, which ran the submission, ended without a record of "
            "this run; submit again",
        )
    return {job.index: state for job in manifest.jobs}


def _state_elsewhere(manifest: Manifest, process: ProcessHandle) -> JobState:
    """Return the state of the jobs of a process on another host that has not recorded its end."""
    silent = silence_s(manifest.path)
    if silent is None:
        # An earlier version of the project, which wrote no heartbeats, started the submission. Or
        # the submission starts or ends at this moment.
        alive = time.time() - manifest.created_at < UNKNOWN_S
        dead = (
            f"submitted on {process.host} more than a day ago and has no heartbeat; run "
            "`python -m jobs status` there to see whether the submission is still running"
        )
    else:
        alive = silent < DEAD_S
        dead = (
            f"the queue on {process.host} has not reported for {silent / 60:.0f} min; it was "
            "killed or suspended, or the host is down; submit again"
        )
    if alive:
        return JobState(Status.running, f"running on {process.host} in process {process.pid}")
    return JobState(Status.killed, dead)
