"""What became of every run: from a folder's manifests and records, squeue, and local processes.

`sacct` is never needed. A run whose job ended without a record is `killed` (or what Slurm says of
its job); nothing is taken for success unless a record says so.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.manifest import Job, Manifest, read_manifests
from jobs.processes import start_ticks
from jobs.record import BadLine, Record, read_records, write_json
from jobs.run import Run

JobStates = dict[str, dict[int, tuple[str, str]]]  # state and detail by submission and job
LIVE = {"queued", "running"}
ENDED = "ended.json"  # in a submission's folder: the last that Slurm said of jobs that ended
RECENT_S = 86400.0
_QUEUED = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "SUSPENDED", "RESV_DEL_HOLD"}
_RUNNING = {"RUNNING", "COMPLETING", "CONFIGURING", "STAGE_OUT", "SIGNALING", "STOPPED", "RESIZING"}
# Slurm's accounting of memory ends a job with the state FAILED, and says why in its stderr only.
_OVER_MEMORY = re.compile(r"^slurmstepd.*exceeded memory limit", re.MULTILINE | re.IGNORECASE)
# What a step's end makes Slurm say, whatever ended it.
_NOISE = re.compile(
    r"srun: (launch/slurm|Force Terminated|forcing|got SIG|Job step aborted|error: Timed out)"
    r"|\*\*\* (STEP|JOB) .* CANCELLED"
)
_ENDED_AS = {"CANCELLED": "cancelled", "PREEMPTED": "preempted", "OUT_OF_MEMORY": "oom"}


@dataclass(frozen=True, slots=True)
class TaskState:
    """One (run, repeat) and how it stands: queued, running, a record's status, or missing."""

    run: Run
    repeat: int
    state: str
    record: Record | None = None  # the latest ok attempt, else the latest
    detail: str = ""  # where no record says it: what Slurm, or the process table, does


@dataclass(frozen=True)
class Observation:
    """A results folder as it stands now."""

    folder: Path
    manifests: list[Manifest]
    records: list[Record]
    bad_lines: list[BadLine]
    tasks: list[TaskState]
    notes: list[str] = field(default_factory=list)
    job_states: JobStates = field(default_factory=dict)

    def counts(self) -> dict[str, int]:
        return dict(Counter(task.state for task in self.tasks))


def observe(folder: Path) -> Observation:
    """Look at everything once.

    Raises:
        FileNotFoundError: nothing was ever submitted into the folder.
    """
    manifests = read_manifests(folder)
    notes: list[str] = []
    # Jobs first, records second: a run that ends in between is then seen with its record.
    job_states = _job_states(manifests, notes)
    records, bad = read_records(folder)
    superseded = _superseded(manifests, notes)
    best: dict[tuple[str, int], Record] = {}
    latest_of: dict[tuple[str, str, int], Record] = {}
    for record in records:  # oldest first
        key = (record.run, record.repeat)
        if record.status == "ok" or key not in best or best[key].status != "ok":
            best[key] = record
        latest_of[(record.submission, *key)] = record
    tasks: dict[tuple[str, int], TaskState] = {}
    for manifest in manifests:  # the newest one that has a say about a run comes last and wins
        for job in manifest.jobs:
            state, detail = job_states[manifest.id][job.index]
            told = {key: latest_of.get((manifest.id, *key)) for key in job.tasks}
            if state not in LIVE and None in told.values():
                state, detail = _with_last_words(manifest, job, state, detail)
            # Slurm blames memory: that is the run it was executing, not those after it.
            at = _running(manifest, job) if state in ("running", "oom") else None
            for key, own in told.items():
                now = state
                if key != at:
                    now = {"running": "queued", "oom": "killed"}.get(state, state)
                run = manifest.runs[key[0]]
                task = _task(run, key[1], now, detail, own, best.get(key))
                if key in tasks and tasks[key].state in LIVE and task.state not in (*LIVE, "ok"):
                    continue  # an earlier submission may still measure it
                tasks[key] = task
        for key in manifest.done:
            known = best.get(key)
            if key not in tasks or (known is not None and tasks[key].state not in LIVE):
                status = known.status if known else "missing"
                tasks[key] = TaskState(manifest.runs[key[0]], key[1], status, known)
    kept = [task for key, task in tasks.items() if key[0] not in superseded]
    return Observation(folder, manifests, records, bad, kept, notes, job_states)


def _task(
    run: Run, repeat: int, state: str, detail: str, own: Record | None, best: Record | None
) -> TaskState:
    """A task whose job is in `state`; `own` is its latest record in that job, `best` in any."""
    if state in LIVE and (own is None or own.status in ("preempted", "cancelled")):
        return TaskState(run, repeat, state, best, detail)
    if own is not None or (best is not None and best.status == "ok"):
        assert best is not None
        return TaskState(run, repeat, best.status, best)
    return TaskState(run, repeat, state, None, detail)


def _superseded(manifests: list[Manifest], notes: list[str]) -> set[str]:
    """Runs of an older version of a benchmark than the folder's newest: other measurements."""
    newest: dict[str, int] = {}
    for manifest in manifests:
        for run in manifest.runs.values():
            newest[run.benchmark] = max(newest.get(run.benchmark, 0), run.version)
    old = {
        run.id
        for manifest in manifests
        for run in manifest.runs.values()
        if run.version < newest[run.benchmark]
    }
    if old:
        notes.append(f"{len(old)} runs of older benchmark versions are left out")
    return old


def _running(manifest: Manifest, job: Job) -> tuple[str, int] | None:
    """The task that a job's worker says, or last said, it is executing."""
    try:
        state = json.loads((manifest.job_folder(job.index) / "state.json").read_text())
    except (OSError, ValueError):
        return None
    running = state["running"]
    return (running["run"], running["repeat"]) if running else None


# ---- jobs ----------------------------------------------------------------------------------------


def _job_states(manifests: list[Manifest], notes: list[str]) -> JobStates:
    """Of each submission's jobs: queued, running, or how it ended (killed, cancelled, preempted,
    oom, missing); and what says so."""
    slurm = [manifest for manifest in manifests if manifest.executor == "slurm"]
    states = {m.id: _local_states(m) for m in manifests if m.executor != "slurm"}
    if slurm:
        states |= _slurm_states(slurm, notes)
    return states


def _local_states(manifest: Manifest) -> dict[int, tuple[str, str]]:
    states = {}
    for job in manifest.jobs:
        handle = manifest.handles.get(job.index)
        if handle is None:
            states[job.index] = ("missing", "never started")
        elif handle["host"] != os.uname().nodename:
            states[job.index] = (
                "killed",
                f"ran on {handle['host']}, which cannot be seen from here",
            )
        elif start_ticks(handle["pid"]) == handle["started"] and handle["started"] is not None:
            states[job.index] = ("running", f"process {handle['pid']}")
        elif handle.get("interrupted"):
            states[job.index] = ("cancelled", "the queue was interrupted")
        else:
            states[job.index] = ("killed", f"process {handle['pid']} ended")
    return states


def _slurm_states(manifests: list[Manifest], notes: list[str]) -> JobStates:
    """As squeue tells it; what it told of jobs that ended is kept, because Slurm forgets."""
    ended = {manifest.id: _read_ended(manifest) for manifest in manifests}
    ids = {m.id: {i: str(h["slurm"]) for i, h in m.handles.items()} for m in manifests}
    unknown = any(str(i) not in ended[m.id] for m in manifests for i in ids[m.id])
    # As long as Slurm knows an ended job, `scontrol requeue` can start it again.
    recent = any(_age_s(manifest.path / ENDED) < RECENT_S for manifest in manifests)
    ask = unknown or recent
    told = squeue([i for of in ids.values() for i in of.values()]) if ask else {}
    if told is None and unknown:
        notes.append("Slurm does not answer; jobs are shown as last seen")
    states: JobStates = {}
    for manifest in manifests:
        before = dict(ended[manifest.id])
        states[manifest.id] = {
            job.index: _slurm_state(manifest, job, told, ended[manifest.id])
            for job in manifest.jobs
        }
        if ended[manifest.id] != before:
            try:
                write_json(manifest.path / ENDED, ended[manifest.id])
            except OSError:  # someone else's folder: then it is asked again next time
                pass
    return states


def _slurm_state(
    manifest: Manifest, job: Job, told: dict[str, str] | None, ended: dict[str, str]
) -> tuple[str, str]:
    handle = manifest.handles.get(job.index)
    if handle is None:
        return "missing", "never submitted"
    job_id, index = handle["slurm"], str(job.index)
    said = (told or {}).get(job_id) or ended.get(index)
    if said is None and told is None:
        return "running", "Slurm does not answer"
    if said is None and not (manifest.path / "slurm" / f"{job_id}_0_log.out").exists():
        # An element of an array that is cancelled while it waits is forgotten at once.
        return "cancelled", f"Slurm job {job_id} never started, and Slurm no longer knows it"
    if said is None:
        return "killed", f"Slurm no longer knows job {job_id}"
    name, what = said.split()[0], f"Slurm job {job_id} is {said}"
    if name in _QUEUED | _RUNNING:
        ended.pop(index, None)
        return "queued" if name in _QUEUED else "running", what
    ended[index] = said
    return _ENDED_AS.get(name, "killed"), what


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


def _with_last_words(manifest: Manifest, job: Job, state: str, detail: str) -> tuple[str, str]:
    """The same, and what the job wrote to its stderr: a setup line's failure, or Slurm's reason."""
    job_id = manifest.handles.get(job.index, {}).get("slurm")
    try:
        with (manifest.path / "slurm" / f"{job_id}_0_log.err").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 4000))
            text = file.read().decode(errors="replace")
    except OSError:  # it never started, or ran elsewhere
        return state, detail
    if state == "killed" and _OVER_MEMORY.search(text):
        state = "oom"
    words = [line.strip() for line in text.split("\n") if line.strip() and not _NOISE.search(line)]
    return state, detail + (f"; its last words: {words[-1][:200]}" if words else "")


def summary(observation: Observation) -> dict[str, Any]:
    """The observation as plain data, for `status --json`."""
    return {
        "folder": str(observation.folder),
        "submissions": [
            {
                "id": m.id,
                "executor": m.executor,
                "sweep": m.sweep.name,
                "created_at": m.created_at,
                "jobs": len(m.jobs),
                "slurm_ids": sorted({str(h["slurm"]) for h in m.handles.values() if "slurm" in h}),
            }
            for m in observation.manifests
        ],
        "counts": observation.counts(),
        "tasks": [
            {
                "run": task.run.id,
                "benchmark": task.run.benchmark,
                "repeat": task.repeat,
                "state": task.state,
                "detail": task.detail,
                "params": task.run.params,
                "failure": task.record.failure.model_dump(exclude_none=True, exclude={"traceback"})
                if task.record and task.record.failure and task.state not in LIVE
                else None,
            }
            for task in observation.tasks
        ],
        "skipped_lines": [str(line) for line in observation.bad_lines],
        "notes": observation.notes,
    }
