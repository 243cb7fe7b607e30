"""The states of a folder's jobs: what Slurm says of them, or the process that runs them."""

from __future__ import annotations

from jobs.results.manifest import Executor, Manifest
from jobs.results.slurm_job_states import slurm_job_states
from jobs.status import JobState, JobStates, Status


def job_states(manifests: list[Manifest], notes: list[str]) -> JobStates:
    """The state of every job of these submissions.

    Args:
        notes: gets what a user should know, such as that Slurm does not answer.
    """
    slurm = [manifest for manifest in manifests if manifest.executor is Executor.slurm]
    states = {m.id: _local_states(m) for m in manifests if m.executor is not Executor.slurm}
    if slurm:
        states |= slurm_job_states(slurm, notes)
    return states


def _local_states(manifest: Manifest) -> dict[int, JobState]:
    process = manifest.process
    if process is None:
        state = JobState(Status.missing, "never started")
    elif not process.is_on_this_host:
        detail = f"ran on {process.host}, which cannot be seen from here"
        state = JobState(Status.killed, detail)
    elif process.is_running:
        state = JobState(Status.running, f"process {process.pid}")
    elif process.interrupted:
        state = JobState(Status.cancelled, "the queue was interrupted")
    else:
        state = JobState(Status.killed, f"process {process.pid} ended")
    return {job.index: state for job in manifest.jobs}
