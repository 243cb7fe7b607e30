"""The states of Slurm jobs: from squeue, and what Slurm wrote into their output.

`sacct` is never needed.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from jobs.json_files import write_json
from jobs.results.manifest import Job, Manifest
from jobs.status import JobState, JobStates, Status

ENDED = "ended.json"  # in a submission's folder: the last that Slurm said of jobs that ended
RECENT_S = 86400.0
_QUEUED = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "SUSPENDED", "RESV_DEL_HOLD"}
_RUNNING = {"RUNNING", "COMPLETING", "CONFIGURING", "STAGE_OUT", "SIGNALING", "STOPPED", "RESIZING"}
_ENDED_AS = {
    "CANCELLED": Status.cancelled,
    "PREEMPTED": Status.preempted,
    "OUT_OF_MEMORY": Status.oom,
}
# Slurm's accounting of memory ends a job with the state FAILED, and says why in its stderr only.
_OVER_MEMORY = re.compile(r"^slurmstepd.*exceeded memory limit", re.MULTILINE | re.IGNORECASE)
# What a step's end makes Slurm say, whatever ended it.
_NOISE = re.compile(
    r"srun: (launch/slurm|Force Terminated|forcing|got SIG|Job step aborted|error: Timed out)"
    r"|\*\*\* (STEP|JOB) .* CANCELLED"
)


def slurm_job_states(manifests: list[Manifest], notes: list[str]) -> JobStates:
    """As squeue has it. Slurm forgets jobs that ended, so its last words on them are kept."""
    ended = {manifest.id: _read_ended(manifest) for manifest in manifests}
    unknown = any(str(i) not in ended[m.id] for m in manifests for i in m.slurm_ids)
    # As long as Slurm knows an ended job, `scontrol requeue` can start it again.
    recent = any(_age_s(manifest.path / ENDED) < RECENT_S for manifest in manifests)
    ids = [job_id for manifest in manifests for job_id in manifest.slurm_ids.values()]
    answer = squeue(ids) if unknown or recent else {}
    if answer is None and unknown:
        notes.append("Slurm does not answer; jobs are shown as last seen")
    states: JobStates = {}
    for manifest in manifests:
        before = dict(ended[manifest.id])
        slurm_ids = manifest.slurm_ids
        states[manifest.id] = {
            job.index: _slurm_state(
                manifest, job, slurm_ids.get(job.index), answer, ended[manifest.id]
            )
            for job in manifest.jobs
        }
        if ended[manifest.id] != before:
            try:
                write_json(manifest.path / ENDED, ended[manifest.id])
            except OSError:  # someone else's folder: then it is asked again next time
                pass
    return states


def _slurm_state(
    manifest: Manifest,
    job: Job,
    job_id: str | None,
    answer: Mapping[str, str] | None,
    ended: dict[str, str],
) -> JobState:
    if job_id is None:
        return JobState(Status.missing, "never submitted")
    index = str(job.index)
    words = (answer or {}).get(job_id) or ended.get(index)
    if words is None and answer is None:
        return JobState(Status.running, "Slurm does not answer")
    if words is None and not _slurm_log(manifest, job_id, "out").exists():
        # An element of an array that is cancelled while it waits is forgotten at once.
        detail = f"Slurm job {job_id} never started, and Slurm no longer knows it"
        return JobState(Status.cancelled, detail)
    if words is None:
        return JobState(Status.killed, f"Slurm no longer knows job {job_id}")
    name, detail = words.split()[0], f"Slurm job {job_id} is {words}"
    if name in _QUEUED | _RUNNING:
        ended.pop(index, None)
        return JobState(Status.queued if name in _QUEUED else Status.running, detail)
    ended[index] = words
    return JobState(_ENDED_AS.get(name, Status.killed), detail)


def _slurm_log(manifest: Manifest, job_id: str, kind: str) -> Path:
    return manifest.path / "slurm" / f"{job_id}_0_log.{kind}"


def _read_ended(manifest: Manifest) -> dict[str, str]:
    try:
        return json.loads((manifest.path / ENDED).read_text())  # type: ignore[no-any-return]
    except (OSError, ValueError):
        return {}


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return math.inf


def squeue(job_ids: list[str]) -> dict[str, str] | None:
    """State, and the reason if Slurm has one, by job id (`123`, `123_4`); None: no answer."""
    if not job_ids:
        return {}
    if shutil.which("squeue") is None:
        return None
    whole = sorted({job_id.split("_")[0] for job_id in job_ids})
    states: dict[str, str] = {}
    for start in range(0, len(whole), 1000):  # a command line has an end
        ids = ",".join(whole[start : start + 1000])
        command = ["squeue", "-h", "-r", "-t", "all", "-j", ids, "-o", "%A|%F|%K|%T|%r"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode and "Invalid job id" not in done.stderr:  # of one that is forgotten
            return None
        for line in done.stdout.splitlines():
            job, array, index, state, reason = line.strip().split("|", 4)
            if reason not in ("None", "") and state != "CANCELLED":  # then it is why it waited
                state += f" ({reason})"
            states[f"{array}_{index}" if index != "N/A" else job] = state
    return states


def with_last_words(manifest: Manifest, job: Job, state: JobState) -> JobState:
    """Add what the job wrote to its stderr: a setup line's failure, or Slurm's reason."""
    job_id = manifest.slurm_ids.get(job.index)
    if job_id is None:
        return state
    try:
        with _slurm_log(manifest, job_id, "err").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4000))
            text = file.read().decode(errors="replace")
    except OSError:  # it never started, or ran elsewhere
        return state
    over_memory = state.status is Status.killed and _OVER_MEMORY.search(text)
    words = [line.strip() for line in text.split("\n") if line.strip() and not _NOISE.search(line)]
    detail = state.detail + (f"; its last words: {words[-1][:200]}" if words else "")
    return JobState(Status.oom if over_memory else state.status, detail)
