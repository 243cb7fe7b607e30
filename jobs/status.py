"""What became of every run: from the manifests and records of a folder, squeue, and local processes.

`sacct` is never needed. A run whose job ended without a record is `killed` (or what Slurm says of
its job); nothing is taken for success unless a record says so.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jobs.expand import Run
from jobs.local_queue import start_ticks
from jobs.manifest import Job, Manifest, read_manifests
from jobs.record import BadLine, Record, read_records, write_json

LIVE = {"queued", "running"}
_QUEUED = {"PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "SUSPENDED", "RESV_DEL_HOLD"}
_RUNNING = {"RUNNING", "COMPLETING", "CONFIGURING", "STAGE_OUT", "SIGNALING", "STOPPED", "RESIZING"}


@dataclass(frozen=True)
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
    job_states = {m.id: _job_states(m, notes) for m in manifests}
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
        states = job_states[manifest.id]
        for job in manifest.jobs:
            state, detail = states[job.index]
            running = _running(manifest, job) if state == "running" else None
            stopped = _running(manifest, job) if state not in LIVE else None
            for run_id, repeat in job.tasks:
                key = (run_id, repeat)
                own = latest_of.get((manifest.id, *key))
                tasks[key] = _task(
                    manifest.runs[run_id],
                    repeat,
                    state,
                    detail,
                    own,
                    best.get(key),
                    running,
                    stopped,
                )
        for key in manifest.done:
            if key not in tasks or tasks[key].state not in LIVE:
                record = best.get(key)
                status = record.status if record else "missing"
                tasks[key] = TaskState(manifest.runs[key[0]], key[1], status, record)
    kept = [task for key, task in tasks.items() if key[0] not in superseded]
    return Observation(folder, manifests, records, bad, kept, notes)


def _task(
    run: Run,
    repeat: int,
    state: str,
    detail: str,
    own: Record | None,
    best: Record | None,
    running: tuple[str, int] | None,
    stopped: tuple[str, int] | None,
) -> TaskState:
    if state in LIVE and (own is None or own.status in ("preempted", "cancelled")):
        now = "running" if running == (run.id, repeat) else "queued"
        return TaskState(run, repeat, now, best, detail)
    if own is not None or (best is not None and best.status == "ok"):
        assert best is not None
        return TaskState(run, repeat, best.status, best)
    if state == "oom":  # Slurm blames memory: that is the run it was executing, not those after it
        state = "oom" if stopped == (run.id, repeat) else "killed"
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


def _job_states(manifest: Manifest, notes: list[str]) -> dict[int, tuple[str, str]]:
    """Of each job: queued, running, or how it ended (killed, cancelled, preempted, oom, missing);
    and what says so."""
    if manifest.executor == "slurm":
        return _slurm_states(manifest, notes)
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
        else:
            states[job.index] = ("killed", f"process {handle['pid']} ended")
    return states


def _slurm_states(manifest: Manifest, notes: list[str]) -> dict[int, tuple[str, str]]:
    """As squeue tells it; what it told of jobs that ended is kept, because Slurm forgets."""
    path = manifest.path / "ended.json"
    try:
        ended: dict[str, str] = json.loads(path.read_text())
    except (OSError, ValueError):
        ended = {}
    unknown = [
        j for j in manifest.jobs if j.index in manifest.handles and str(j.index) not in ended
    ]
    told = _squeue() if unknown else {}
    if told is None:
        notes.append("Slurm does not answer; jobs are shown as last seen")
    states: dict[int, tuple[str, str]] = {}
    fresh = False
    for job in manifest.jobs:
        handle = manifest.handles.get(job.index)
        if handle is None:
            states[job.index] = ("missing", "never submitted")
            continue
        name = ended.get(str(job.index))
        if name is None and told is None:
            states[job.index] = ("queued", "Slurm does not answer")
            continue
        if name is None:
            assert told is not None
            name = told.get(handle["slurm"], "UNKNOWN")
        what = f"Slurm job {handle['slurm']} is {name}"
        if name in _QUEUED:
            states[job.index] = ("queued", what)
        elif name in _RUNNING:
            states[job.index] = ("running", what)
        else:
            fresh = fresh or str(job.index) not in ended
            ended[str(job.index)] = name
            states[job.index] = (_ended_as(name), what)
    if fresh:
        try:
            write_json(path, ended)
        except OSError:  # someone else's folder: then it is asked again next time
            pass
    return states


def _ended_as(name: str) -> str:
    if name.startswith("CANCELLED"):
        return "cancelled"
    return {"PREEMPTED": "preempted", "OUT_OF_MEMORY": "oom"}.get(name, "killed")


def _squeue() -> dict[str, str] | None:
    """State by job id (`123`, `123_4`) of this user's jobs; None where Slurm does not answer."""
    if shutil.which("squeue") is None:
        return None
    command = ["squeue", "-h", "-r", "-t", "all", "-u", str(os.getuid()), "-o", "%A|%F|%K|%T"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    states = {}
    for line in done.stdout.splitlines():
        job, array, index, state = line.strip().split("|")
        states[f"{array}_{index}" if index != "N/A" else job] = state
    return states


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
                "repeat": task.repeat,
                "state": task.state,
                "detail": task.detail,
                "params": task.run.params,
                "failure": task.record.failure.model_dump(exclude_none=True, exclude={"traceback"})
                if task.record and task.record.failure
                else None,
            }
            for task in observation.tasks
        ],
        "skipped_lines": [str(line) for line in observation.bad_lines],
        "notes": observation.notes,
    }
