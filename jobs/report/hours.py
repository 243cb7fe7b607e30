"""Adds up the hours and GPU-hours of the attempts in a results folder.

An attempt is one execution of a run. Its GPU-hours are its duration times the number of GPUs that
the run requested. The start of a job and the time between its runs belong to no attempt.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from jobs.results.counting import is_thrown_away, results_of, tried
from jobs.results.record import Record
from jobs.results.run_states import Observation

# What the GPU-hours were used for. An attempt that is not in the results is `wasted` as a whole.
# `other` is the part of an attempt that its record does not assign to a stage.
STAGES = ("starting", "compiling", "measuring", "other", "wasted")
_HOUR = 3600.0


@dataclass
class Hours:
    """Hours of the attempts of one sweep."""

    sweep: str
    runs: set[str] = field(default_factory=set)  # ids of the runs that were attempted
    attempts: int = 0
    queued: float = 0.0  # hours that jobs waited for their start
    wall: float = 0.0  # hours of all attempts
    uses_gpus: bool = False  # whether any attempt requested a GPU
    gpu: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))  # GPU-hours

    def add(self, record: Record, gpus: int, is_result: bool) -> None:
        """Add an attempt, with its GPUs on all nodes."""
        took = max(0.0, record.finished_at - record.started_at)
        self.runs.add(record.run)
        self.attempts += 1
        self.wall += took / _HOUR
        self.uses_gpus |= gpus > 0
        seconds = _stages(record, took) if is_result else {"wasted": took}
        for stage, one in seconds.items():
            self.gpu[stage] += one * gpus / _HOUR


def _stages(record: Record, took: float) -> dict[str, float]:
    """Return the seconds of each stage of an attempt."""
    known = {
        "starting": record.seconds.starting or 0.0,
        "compiling": record.seconds.compiling or 0.0,
        "measuring": record.seconds.measuring or 0.0,
    }
    return known | {"other": max(0.0, took - sum(known.values()))}


def hours(observation: Observation) -> list[Hours]:
    """Return the hours of each sweep in a results folder, in the order of the submissions.

    In the results are the best attempt of each run, repeat and kind of device, and in a block, all
    attempts of the latest complete execution of each round, of a round that a job is executing, and
    of trials of the same code on the same GPUs. Attempts with a status that is a failure, and those
    of an outdated version of a benchmark, are not.
    """
    rows = {each.sweep.name: Hours(each.sweep.name) for each in observation.manifests}
    in_results = _in_results(observation)
    gpus = {
        (manifest.id, run.id): run.shape.gpus
        for manifest in observation.manifests
        for run in manifest.runs.values()
    }
    for record in observation.records:
        row = rows.setdefault(record.sweep, Hours(record.sweep))
        # Without the manifest, the GPUs of the first node are known.
        count = gpus.get((record.submission, record.run), len(record.gpus))
        row.add(record, count, id(record) in in_results)
    for (sweep, _, _), seconds in _waiting(observation.records).items():
        rows[sweep].queued += seconds / _HOUR
    return list(rows.values())


def _waiting(records: Iterable[Record]) -> dict[tuple[str, str, int], float]:
    """Return how many seconds each job waited for its first start, by sweep, submission and job.

    All records of a worker have the same time. A worker that was started again has a longer one.
    """
    waited: dict[tuple[str, str, int], float] = {}
    for record in records:
        if record.seconds.waiting is not None:
            job = record.sweep, record.submission, record.job
            waited[job] = min(record.seconds.waiting, waited.get(job, record.seconds.waiting))
    return waited


def _in_results(observation: Observation) -> set[int]:
    """Return the identities of the records that are in the results, see `hours`."""
    shown = {task.key for task in observation.tasks}
    records = [r for r in observation.records if (r.run, r.repeat) in shown]
    executing = {  # the latest execution of a round, by live job
        (r.submission, r.job): r.block.execution
        for r in records
        if r.block is not None and _is_live(observation, r.submission, r.job)
    }
    now = [r for r in records if r.block and r.block.execution in executing.values()]
    kept = [*results_of(records), *now]
    measured = {tried(record) for record in kept if record.block}
    trials = [r for r in records if is_thrown_away(r) and tried(r) in measured]
    return {id(r) for r in [*kept, *trials] if not r.status.is_failure}


def _is_live(observation: Observation, submission: str, job: int) -> bool:
    state = observation.job_states.get(submission, {}).get(job)
    return state is not None and state.status.is_live
