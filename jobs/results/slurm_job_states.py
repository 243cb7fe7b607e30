"""States of Slurm jobs, from squeue and the logs of the jobs. No accounting database is needed."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from jobs.formatting import on_one_line
from jobs.results.manifest import (
    HANDLES,
    BrokenManifest,
    Job,
    Manifest,
    read_manifest,
    write_handles,
)
from jobs.results.slurm_job import SlurmJob
from jobs.results.slurm_queue import UNCONFIRMED_S, Answer, ask
from jobs.results.unreadable import BadLine, read_json
from jobs.status import JobState, JobStates, Status
from jobs.whole_files import age_s, write_json

ENDED = "ended.json"  # file in a submission's folder: last known states of ended jobs
REFUSAL = "refusal.txt"  # file in a submission's folder: why sbatch refused a job array
# End of a line in stderr, see `jobs.launch.slurm_executor`
STEP_AGAIN = "starting the job step again"
RECENT_S = 86400.0  # squeue is still asked while ENDED is younger than this, in seconds
GONE = "UNKNOWN"  # word in ENDED: Slurm no longer knows the job
# What Slurm's words for states mean. A job with another word is alive, whatever the word says.
_QUEUED = {
    "PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "SUSPENDED",
    "RESV_DEL_HOLD",
}  # fmt: skip
_ENDED_AS = {
    "CANCELLED": Status.cancelled,
    "PREEMPTED": Status.preempted,
    "OUT_OF_MEMORY": Status.oom,
    **dict.fromkeys(
        ["BOOT_FAIL", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL", "REVOKED",
         "TIMEOUT"],
        Status.killed,
    ),
}  # fmt: skip
# Reasons why a job fails without a start, or stays pending: no nodes have what it requests.
_NOT_OFFERED = re.compile(r"BadConstraints|PartitionConfig|PartitionNodeLimit")
_STATES = TypeAdapter(dict[str, Annotated[str, Field(pattern=r"\S")]])  # content of ENDED
# A job that exceeds its memory limit may end as FAILED. Only its stderr then shows the cause.
_OVER_MEMORY = re.compile(r"^slurmstepd.*exceeded memory limit", re.MULTILINE | re.IGNORECASE)
# A line of srun that says how a task of the job step ended: the numbers of the tasks, and how.
_VERDICT = re.compile(r"^srun: error: .*\btasks? ([\d,-]+): (.*)")
_OF_SLURM = re.compile(r"^(srun|slurmstepd)(-[^:]*)?: ")
_OF_SUBMITIT = re.compile(r"^submitit [A-Z]+ \(")
# Lines that Slurm writes at the end of any job step, so they do not show the cause.
_NOISE = re.compile(
    r"srun: (launch/slurm|Force Terminated|Terminating|forcing|got SIG|Job step aborted)"
    r"|srun: error: Timed out"
    r"|\*\*\* (STEP|JOB) .* CANCELLED"
)


def slurm_job_states(manifests: list[Manifest], notes: list[str]) -> JobStates:
    """Return the state of each job of Slurm submissions, by submission id and job index.

    squeue shows an ended job only for a limited time. So the last states of ended jobs are saved in
    `ended.json`, and the ids of jobs that sbatch did not report in `handles.json`.
    """
    bad: list[BadLine] = []
    ended = {m.id: read_json(m.path / ENDED, _STATES, bad) or {} for m in manifests}
    notes += map(str, bad)
    unknown: list[SlurmJob] = []
    recent: list[SlurmJob] = []  # `scontrol requeue` restarts ended jobs that Slurm still knows
    for manifest in manifests:
        is_recent = age_s(manifest.path / ENDED) < RECENT_S
        for index, job in manifest.slurm_jobs.items():
            word = ended[manifest.id].get(str(index))
            if word is None:
                unknown.append(job)
            elif word != GONE and is_recent:
                recent.append(job)
    answers = ask({*unknown, *recent})
    if unknown:
        silent = dict.fromkeys(a.unknown for a in answers.values() if a.unknown)
        notes += [f"{why}; jobs that may still run are shown as unknown" for why in silent]
    states: JobStates = {}
    for manifest in manifests:
        _adopt(manifest, answers)
        before = dict(ended[manifest.id])
        states[manifest.id] = {
            job.index: _slurm_state(manifest, job, answers, ended[manifest.id])
            for job in manifest.jobs
        }
        if ended[manifest.id] != before:
            with suppress(OSError):  # e.g. another user's folder: ask Slurm again next time
                write_json(manifest.path / ENDED, ended[manifest.id])
    return states


def _adopt(manifest: Manifest, answers: dict[SlurmJob, Answer]) -> None:
    """Note the ids of jobs that Slurm has accepted although sbatch did not say so."""
    old = False
    for index, job in manifest.slurm_jobs.items():
        answer = answers.get(job)
        if job.id is None and answer is not None and answer.found is not None:
            known = manifest.handles[index] = job.with_number(str(answer.found.number))
            answers[known] = answer
            old |= time.time() - job.since > UNCONFIRMED_S
    if old:  # before that, the submit command may write the file
        with suppress(OSError, BrokenManifest):
            now = read_manifest(manifest.path)
            now.handles.update({i: job for i, job in manifest.slurm_jobs.items() if job.id})
            write_handles(now)


def _slurm_state(
    manifest: Manifest, job: Job, answers: Mapping[SlurmJob, Answer], ended: dict[str, str]
) -> JobState:
    handle = manifest.handles.get(job.index)
    if not isinstance(handle, SlurmJob) and manifest.handles_unreadable:
        return JobState(Status.unknown, f"{manifest.path / HANDLES} cannot be read")
    if not isinstance(handle, SlurmJob):
        return JobState(Status.missing, f"not submitted: {_why_not(manifest)}; submit again")
    index, answer = str(job.index), answers.get(handle, Answer())
    words = answer.found.words if answer.found else ended.get(index)
    if words is None and answer.unknown:
        return JobState(Status.unknown, answer.unknown)
    if handle.id is None:
        if handle in answers:
            ended[index] = GONE
        return JobState(Status.missing, "not submitted: interrupted at sbatch; submit again")
    if words is None:
        words = ended[index] = GONE
    if words == GONE:
        other = f"; {answer.other}" if answer.other else ""
        if not _slurm_log(manifest, handle.id, "out").exists():
            # An array element that is cancelled while pending disappears from squeue at once.
            why = "never started, and Slurm no longer knows it; it was probably cancelled while "
            return JobState(Status.cancelled, f"Slurm job {handle.id} {why}pending{other}")
        why = "has ended, and Slurm no longer knows its final state"
        return JobState(Status.killed, f"Slurm job {handle.id} {why}{other}")
    offer = f"no nodes of its partition that it may use offer {job.shape}"
    says = _NOT_OFFERED.sub(lambda reason: f"{reason[0]}: {offer}", words)
    name, detail = words.split()[0], f"Slurm job {handle.id} is {says}"
    if name in _ENDED_AS:
        ended[index] = words
        if "JobLaunchFailure" in words:
            folder = manifest.path / "slurm"
            detail += f"; the node could not start it: can it write to {folder}, under this path?"
        return JobState(_ENDED_AS[name], detail)
    ended.pop(index, None)
    return JobState(Status.queued if name in _QUEUED else Status.running, detail)


def _why_not(manifest: Manifest) -> str:
    try:
        text = (manifest.path / REFUSAL).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "the submission was interrupted before Slurm accepted the job"
    return on_one_line(text)[:500] or "sbatch failed without a message"


def _slurm_log(manifest: Manifest, job_id: str, kind: str, task: str = "0") -> Path:
    return manifest.path / "slurm" / f"{job_id}_{task}_log.{kind}"


def with_last_words(manifest: Manifest, job: Job, state: JobState) -> JobState:
    """Return the state of a job with the cause in its stderr. If that is its memory, it is oom."""
    job_id = manifest.slurm_ids.get(job.index)
    if job_id is None:
        return state
    over_memory = state.status is Status.killed and exceeded_memory(manifest, job_id)
    line = _cause(manifest, job_id)
    detail = state.detail + (f"; last line of its stderr: {line[:200]}" if line else "")
    return JobState(Status.oom if over_memory else state.status, detail)


def exceeded_memory(manifest: Manifest, job_id: str) -> bool:
    """Return whether Slurm ended a step of a job because it exceeded its memory limit."""
    return _OVER_MEMORY.search("\n".join(_stderr(manifest, job_id))) is not None


def _cause(manifest: Manifest, job_id: str) -> str:
    """Return the line of a job's stderr that probably shows why the job failed.

    If srun reports that a task exited with an exit code, the task has printed the cause: the last
    line that is not from Slurm. Else, e.g. if a signal ended the task, the report is the cause. The
    first report counts, because the other tasks end as a result.
    """
    lines = _stderr(manifest, job_id)
    starts = [i for i, line in enumerate(lines) if line.endswith(STEP_AGAIN)]
    lines = lines[starts[-1] + 1 :] if starts else lines
    verdict = next((found for line in lines if (found := _VERDICT.match(line))), None)
    if verdict is None:
        return lines[-1] if lines else ""
    if not verdict[2].startswith("Exited with exit code"):
        return verdict[0]
    first = re.split("[,-]", verdict[1])[0]
    own = lines if first == "0" else _stderr(manifest, job_id, first)
    words = [line for line in own if not _OF_SLURM.match(line) and not _OF_SUBMITIT.match(line)]
    errors = [line for line in own if line.startswith("slurmstepd")]  # such as a failed execve
    return [verdict[0], *errors[-1:], *words[-1:]][-1]


def _stderr(manifest: Manifest, job_id: str, task: str = "0") -> list[str]:
    """Return the last lines of a task's stderr. Task 0 shares it with the batch script and srun."""
    try:
        with _slurm_log(manifest, job_id, "err", task).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4000))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.strip() for line in text.split("\n") if line.strip() and not _NOISE.search(line)]
