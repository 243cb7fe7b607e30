"""Determines the status of every run in a results folder, from manifests, records and job states.

A run is `ok` only if it has a record with status `ok`. If its job ended without a record of it, its
status comes from the state of the job, and is for example `cancelled` or `killed`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from jobs.block import Block, TaskKey
from jobs.formatting import counted
from jobs.results import unwritable
from jobs.results.counting import best as best_attempts
from jobs.results.counting import is_thrown_away, superseded
from jobs.results.job_states import job_states
from jobs.results.judgements import Judgement, read_judgements
from jobs.results.manifest import Executor, Job, Manifest, read_manifests
from jobs.results.record import Failure, Record, is_stale, present_last
from jobs.results.record_reader import read_records
from jobs.results.slurm_job_states import with_last_words
from jobs.results.unreadable import BadLine
from jobs.results.worker_state import read_worker_end, read_worker_state
from jobs.run import Run
from jobs.status import JobState, JobStates, Status
from jobs.sweep.run_sources import RunSources, source_hashes


@dataclass(frozen=True, slots=True)
class TaskState:
    """The state of a task: one repeat of a run, or its part in a round."""

    run: Run
    repeat: int
    status: Status
    record: Record | None = None  # of the best attempt, see `jobs.results.counting`
    detail: str = ""  # detail of the job's state, if the status is not from a record

    @property
    def key(self) -> TaskKey:
        return self.run.id, self.repeat

    @property
    def outcome(self) -> Record | None:
        """The record, unless the task is queued or runs again."""
        return None if self.status.is_live else self.record

    @property
    def failure(self) -> Failure | None:
        return self.outcome.failure if self.outcome else None


@dataclass(frozen=True, eq=False)  # equal only to itself, so that it can be a key of a cache
class Observation:
    """The state of a results folder at one moment: its submissions, records, jobs and runs."""

    folder: Path
    manifests: list[Manifest]
    records: list[Record]  # oldest first, but those of the present code last
    bad_lines: list[BadLine]  # lines of records, and files, that were skipped
    tasks: list[TaskState]
    notes: list[str] = field(default_factory=list)
    job_states: JobStates = field(default_factory=dict)
    judgements: dict[str, Judgement] = field(default_factory=dict)  # the latest one by block id
    # Hash of the present sources of each run, None if unknown
    source_hashes: Mapping[str, str | None] = field(default_factory=dict)

    @cached_property
    def runs(self) -> dict[str, Run]:
        """The runs by id, without those of an outdated version of a benchmark."""
        return {task.run.id: task.run for task in self.tasks}

    @cached_property
    def stale(self) -> frozenset[TaskKey]:
        """The tasks with results of older code."""
        return frozenset(
            task.key
            for task in self.tasks
            if task.outcome is not None and is_stale(task.outcome, self.source_hashes)
        )

    def counts(self) -> dict[Status, int]:
        return dict(Counter(task.status for task in self.tasks))


def observe(folder: Path, sources: RunSources | None = None) -> Observation:
    """Read a results folder. With the same `sources`, several folders read the code only once.

    Raises:
        FileNotFoundError: if it does not contain submissions.
        UnreadableResults: if it cannot be read.
    """
    bad: list[BadLine] = []
    notes: list[str] = []
    manifests = read_manifests(folder, bad)
    # Read the job states first. The record of a run that ends in between is then found.
    states = job_states(manifests, notes)
    records, bad_lines = read_records(folder)
    bad += bad_lines
    runs = (run for manifest in manifests for run in manifest.runs.values())
    hashes = source_hashes(runs, sources)
    records = present_last(records, hashes)
    best = best_attempts(records, lambda record: (record.run, record.repeat), hashes)
    latest_of = {  # the oldest are first
        (r.submission, r.run, r.repeat): r for r in records if not is_thrown_away(r)
    }
    tasks: dict[TaskKey, TaskState] = {}
    judgements: dict[str, Judgement] = {}
    for manifest in manifests:  # oldest first: a newer submission of a run overrides an older one
        for job in manifest.jobs:
            judged = _judged_blocks(manifest, job, bad)
            judgements |= {block.id: judgement for block, judgement in judged}
            latest_here = {key: latest_of.get((manifest.id, *key)) for key in job.tasks}
            state = states[manifest.id][job.index]
            for task in _job_tasks(manifest, job, state, judged, latest_here, best, bad):
                key = task.key
                earlier = tasks.get(key)
                # A run that an earlier submission is still executing stays queued or running.
                earlier_is_live = earlier is not None and earlier.status.is_live
                if earlier is not None and earlier.status is Status.unknown and latest_here[key]:
                    earlier_is_live = False  # the run was repeated meanwhile
                if not earlier_is_live or task.status.is_live or task.status is Status.ok:
                    tasks[key] = task
        for key in manifest.done:
            known = best.get(key)
            if key not in tasks or (known is not None and not tasks[key].status.is_live):
                status = known.status if known else Status.missing
                tasks[key] = TaskState(manifest.runs[key[0]], key[1], status, known)
    old = superseded(run for manifest in manifests for run in manifest.runs.values())
    if old:
        newer = "the folder has runs of a newer version of the benchmark"
        notes.append(f"{counted(len(old), 'run')} not shown: {newer}")
    if problem := unwritable.problem(folder, manifests[-1].path):
        notes.append(problem)
    kept = [task for key, task in tasks.items() if key[0] not in old]
    return Observation(folder, manifests, records, bad, kept, notes, states, judgements, hashes)


def not_needed(manifest: Manifest) -> set[TaskKey]:
    """Return the tasks of a submission whose blocks are decided."""
    found: set[TaskKey] = set()
    for job in manifest.jobs:
        judged = _judged_blocks(manifest, job)
        runs = {run for block, each in judged if each.is_decided for run in block.runs}
        found |= {task for task in job.tasks if task[0] in runs}
    return found


def _judged_blocks(
    manifest: Manifest, job: Job, bad: list[BadLine] | None = None
) -> list[tuple[Block, Judgement]]:
    """Return what the worker of a job decided about blocks with `rounds: auto`."""
    if not any(block.auto for block in manifest.blocks):
        return []
    found = read_judgements(manifest.job_folder(job.index), bad)
    return [(block, found[block.id]) for block in manifest.blocks if block.id in found]


def _job_tasks(
    manifest: Manifest,
    job: Job,
    state: JobState,
    judged: list[tuple[Block, Judgement]],
    latest_here: dict[TaskKey, Record | None],
    best: dict[TaskKey, Record],
    bad: list[BadLine],
) -> Iterator[TaskState]:
    """Yield the state of each task of a job.

    `latest_here` has its latest record in this submission, or None, `best` its best attempt of any.
    """
    folder = manifest.job_folder(job.index)
    if None in latest_here.values():
        if manifest.executor is not Executor.slurm:
            end = read_worker_end(folder, bad)
            if end is not None:
                state = JobState(Status.killed, f"{end.text(job.index)}; submit again")
        elif not state.status.is_live:
            state = with_last_words(manifest, job, state)
    executing = None
    if state.status in (Status.running, Status.unknown, Status.oom):
        running = read_worker_state(folder, bad).running
        executing = running and (running.run, running.repeat)
    judgement_of = {run: judgement for block, judgement in judged for run in block.runs}
    # If the job ran out of memory, the run that was executing is `oom`, the others are `killed`.
    others = {Status.running: Status.queued, Status.oom: Status.killed}
    for key, latest in latest_here.items():
        status = state.status if key == executing else others.get(state.status, state.status)
        detail = state.detail
        if status is Status.unknown and key == executing:
            detail = f"a worker was executing it; {detail}"
        if state.status is Status.running and status is Status.queued:
            detail = f"waiting for earlier runs of its job ({detail})"
        known = best.get(key)
        run, repeat = manifest.runs[key[0]], key[1]
        judgement = judgement_of.get(run.id) if latest is None and known is None else None
        if judgement is not None and judgement.is_decided:
            detail = f"decided after {counted(judgement.rounds, 'round')}"
            yield TaskState(run, repeat, Status.not_needed, None, detail)
        elif judgement is not None and judgement.out_of_time and not status.is_live:
            detail = "the job had no time for another round; submit again"
            yield TaskState(run, repeat, Status.missing, None, detail)
        # A job that is queued or running repeats its runs that were preempted or cancelled.
        elif status.is_live and (latest is None or latest.status.runs_again_in_its_job):
            yield TaskState(run, repeat, status, known, detail)
        elif known is not None and (
            latest is not None
            or known.status is Status.ok
            or status in (Status.cancelled, Status.missing)
        ):  # a retry that was cancelled or refused leaves the earlier failure
            yield TaskState(run, repeat, known.status, known)
        else:
            yield TaskState(run, repeat, status, None, detail)


def summary(observation: Observation) -> dict[str, Any]:
    """Return the state of a results folder as JSON data, for the command `status --json`."""
    return {
        "folder": str(observation.folder),
        "submissions": [
            {
                "id": m.id,
                "executor": m.executor,
                "sweep": m.sweep.name,
                "created_at": m.created_at,
                "jobs": len(m.jobs),
                "slurm_ids": sorted(set(m.slurm_ids.values())),
            }
            for m in observation.manifests
        ],
        "counts": observation.counts(),
        "tasks": [
            {
                "run": task.run.id,
                "benchmark": task.run.benchmark,
                "repeat": task.repeat,
                "state": task.status,
                "detail": task.detail,
                "stale": task.key in observation.stale,
                "params": task.run.params,
                "failure": task.failure
                and task.failure.model_dump(exclude_none=True, exclude={"traceback"}),
            }
            for task in observation.tasks
        ],
        "skipped_lines": [str(line) for line in observation.bad_lines],
        "notes": observation.notes,
    }
