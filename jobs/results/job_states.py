"""Determines the states of jobs, from Slurm or from the local process that runs the jobs."""

from __future__ import annotations

from jobs.results.manifest import Executor, Manifest
from jobs.results.slurm_job_states import slurm_job_states
from jobs.status import JobState, JobStates, Status


def job_states(manifests: list[Manifest], notes: list[str]) -> JobStates:
    """Return the state of every job of the given submissions, by submission id and job index.

    Args:
        manifests: manifests of the submissions.
        notes: list to which notes for the user are added, e.g. that Slurm does not answer.
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
    elif not process.is_on_this_host:
        detail = (
            f"submitted on {process.host}, whose processes are not visible on this host; run "
            "`python -m jobs status` there to see whether the submission is still running"
        )
        state = JobState(Status.killed, detail)
    elif process.is_running:
        state = JobState(Status.running, f"the submission runs in process {process.pid}")
    elif process.interrupted:
        state = JobState(Status.cancelled, "the local queue was interrupted; submit again")
    else:
        state = JobState(
            Status.killed,
            f"process {process.pid}, which ran the submission, ended without a record of this run; "
            "submit again",
        )
    return {job.index: state for job in manifest.jobs}
