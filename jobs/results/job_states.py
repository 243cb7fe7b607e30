"""Determines the states of jobs, from Slurm or from the local process that runs the jobs."""

from __future__ import annotations

import time

from jobs.results.heartbeat import DEAD_S, HEARTBEAT
from jobs.results.manifest import Executor, Manifest
from jobs.results.slurm_job_states import slurm_job_states
from jobs.status import JobState, JobStates, Status
from jobs.whole_files import age_s


def job_states(manifests: list[Manifest], notes: list[str]) -> JobStates:
    """Return the state of every job, by submission id and job index. Problems go to `notes`."""
    slurm = [manifest for manifest in manifests if manifest.executor is Executor.slurm]
    states = {
        manifest.id: dict.fromkeys((job.index for job in manifest.jobs), _local_state(manifest))
        for manifest in manifests
        if manifest.executor is not Executor.slurm
    }
    return states | (slurm_job_states(slurm, notes) if slurm else {})


def _local_state(manifest: Manifest) -> JobState:
    process = manifest.process
    if process is None:
        return JobState(Status.missing, "the submission never started its jobs; submit again")
    here = process.is_on_this_host
    if not process.ended and here and process.is_running:
        return JobState(Status.running, f"the submission runs in process {process.pid}")
    if process.interrupted:
        return JobState(Status.cancelled, "the submission was interrupted; submit again")
    if not process.ended and not here:
        # A network file system may not show the first heartbeat at once.
        silent = min(age_s(manifest.path / HEARTBEAT), time.time() - manifest.created_at)
        if silent < DEAD_S:
            detail = f"running on {process.host} in process {process.pid}"
            return JobState(Status.running, detail)
        return JobState(
            Status.killed,
            f"the queue on {process.host} has not reported for {DEAD_S / 60:.0f} min or more; it "
            "was killed or suspended, or the host is down; submit again",
        )
    where = "" if here else f" on {process.host}"
    return JobState(
        Status.killed,
        f"process {process.pid}{where}, which ran the submission, ended without a record of this "
        "run; submit again",
    )
