"""Determines the states of Slurm jobs, from squeue and from the logs of the jobs.

`sacct` is not used, so the cluster needs no accounting database.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from jobs.formatting import on_one_line
from jobs.results.manifest import Job, Manifest
from jobs.results.unreadable import BadLine, first_problem
from jobs.slurm_client import SlurmSilent, slurm_client
from jobs.status import JobState, JobStates, Status
from jobs.whole_files import write_json

ENDED = "ended.json"  # file in a submission's folder: last known states of ended jobs
REFUSAL = "refusal.txt"  # file in a submission's folder: why sbatch refused a job array
STEP_AGAIN = (
    "starting the job step again"  # end of a line in stderr, see `jobs.launch.sbatch_setup`
)
RECENT_S = 86400.0  # squeue is still asked while ENDED is younger than this, in seconds
_QUEUED = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "SUSPENDED", "RESV_DEL_HOLD"}
_RUNNING = {"RUNNING", "COMPLETING", "CONFIGURING", "STAGE_OUT", "SIGNALING", "STOPPED", "RESIZING"}
_ENDED_AS = {
    "CANCELLED": Status.cancelled,
    "PREEMPTED": Status.preempted,
    "OUT_OF_MEMORY": Status.oom,
}
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
    """Return the state of each job of Slurm submissions, by submission id and then by job index.

    squeue shows an ended job only for a limited time. Therefore the last known states of ended jobs
    are saved in the file `ended.json` in the folder of the submission.

    Args:
        notes: list to which a note for the user is added if Slurm does not answer, or if the file
            `ended.json` cannot be read.
    """
    ended = {manifest.id: _read_ended(manifest, notes) for manifest in manifests}
    unknown = any(str(i) not in ended[m.id] for m in manifests for i in m.slurm_ids)
    # `scontrol requeue` can restart an ended job that Slurm still knows.
    recent = any(_age_s(manifest.path / ENDED) < RECENT_S for manifest in manifests)
    ids = [job_id for manifest in manifests for job_id in manifest.slurm_ids.values()]
    answer: dict[str, str] | None = {}
    try:
        answer = squeue(ids) if unknown or recent else {}
    except SlurmSilent as error:
        answer = None
        if unknown:
            notes.append(f"{error}; jobs that are not known to have ended are shown as running")
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
            except OSError:  # e.g. another user's folder: ask Slurm again next time
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
        return JobState(Status.missing, f"not submitted: {_why_not(manifest)}; submit again")
    index = str(job.index)
    words = (answer or {}).get(job_id) or ended.get(index)
    if words is None and answer is None:
        return JobState(Status.running, "assumed to be running, since Slurm does not answer")
    if words is None and not _slurm_log(manifest, job_id, "out").exists():
        # An array element that is cancelled while pending disappears from squeue at once.
        detail = (
            f"Slurm job {job_id} never started, and Slurm no longer knows it; it was probably "
            "cancelled while pending"
        )
        return JobState(Status.cancelled, detail)
    if words is None:
        return JobState(
            Status.killed,
            f"Slurm job {job_id} has ended, and Slurm no longer knows its final state",
        )
    name, detail = words.split()[0], f"Slurm job {job_id} is {words}"
    if name in _QUEUED | _RUNNING:
        ended.pop(index, None)
        return JobState(Status.queued if name in _QUEUED else Status.running, detail)
    ended[index] = words
    return JobState(_ENDED_AS.get(name, Status.killed), detail)


def _why_not(manifest: Manifest) -> str:
    """Return why a job of a submission has no Slurm id."""
    try:
        text = (manifest.path / REFUSAL).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "the submission was interrupted before Slurm accepted the job"
    return on_one_line(text)[:500] or "sbatch failed without a message"


def _slurm_log(manifest: Manifest, job_id: str, kind: str, task: str = "0") -> Path:
    return manifest.path / "slurm" / f"{job_id}_{task}_log.{kind}"


def _read_ended(manifest: Manifest, notes: list[str]) -> dict[str, str]:
    path = manifest.path / ENDED
    try:
        return _STATES.validate_json(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        reason = str(error.strerror)
    except ValidationError as error:
        reason = first_problem(error)
    notes.append(str(BadLine(path, 0, reason)))
    return {}


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return math.inf


def squeue(job_ids: list[str]) -> dict[str, str]:
    """Return the states of jobs as squeue reports them.

    Args:
        job_ids: ids such as "123", or "123_4" for an element of a job array.

    Returns:
        The state of each job that Slurm knows, by job id. The reason, if Slurm gives one, follows
        in parentheses, such as "PENDING (Priority)".

    Raises:
        SlurmSilent: if Slurm does not answer.
    """
    whole = sorted({job_id.split("_")[0] for job_id in job_ids})
    states: dict[str, str] = {}
    for start in range(0, len(whole), 1000):  # the length of a command line is limited
        ids = ",".join(whole[start : start + 1000])
        command = ("squeue", "-h", "-r", "-t", "all", "-j", ids, "-o", "%A|%F|%K|%T|%r")
        done = slurm_client(*command)
        # squeue also fails for a job that Slurm no longer knows. That is no error here.
        if done.returncode and "Invalid job id" not in done.stderr:
            why = on_one_line(done.stderr)
            raise SlurmSilent(f"Slurm does not answer: 'squeue' failed: {why}")
        for line in done.stdout.splitlines():
            job, array, index, state, reason = line.strip().split("|", 4)
            # For a cancelled job, squeue shows the reason why the job was pending before.
            if reason not in ("None", "") and state != "CANCELLED":
                state += f" ({reason})"
            states[f"{array}_{index}" if index != "N/A" else job] = state
    return states


def with_last_words(manifest: Manifest, job: Job, state: JobState) -> JobState:
    """Add the line of a job's stderr that shows why it failed to the detail of the job's state.

    The detail is a text for the user. See `_cause` for the choice of the line. If stderr reports
    that the memory limit was exceeded, the status `killed` is replaced by `oom`.

    Returns:
        The new state. If the job has no readable stderr, `state` is returned.
    """
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

    If srun reports that a task exited with an exit code, the task has printed the cause, and the
    last line that is not from Slurm is returned. Otherwise, e.g. if a signal ended the task, the
    report of srun is the cause. The first report counts, because the other tasks end as a result.
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
    """Return the last lines of a job's stderr, without those that say nothing about the cause.

    The result is empty if the job never started, or if its log cannot be read. Task 0 shares its
    file with the batch script and srun.
    """
    try:
        with _slurm_log(manifest, job_id, "err", task).open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4000))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.strip() for line in text.split("\n") if line.strip() and not _NOISE.search(line)]
