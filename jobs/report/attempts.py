"""Lists all attempts of a results folder, with those that tables do not show and why.

python aggregate.py attempts logs/flash --where 'seq_len == 1024'
"""

from __future__ import annotations

from jobs.formatting import format_number, format_scalar, format_utc, parameter_header
from jobs.frame.metrics import median_ms
from jobs.frame.recorded import RECORDED, recorded_value
from jobs.frame.results import list_results
from jobs.results.counting import select_attempts, superseded
from jobs.results.record import Record
from jobs.results.run_states import Observation, TaskState
from jobs.run import Run, Shape, varying


def attempts_of(observation: Observation) -> list[TaskState]:
    """Return a `TaskState` for each attempt, with the status and the record of the attempt.

    The attempts are in the order of the runs in the submissions. Runs of no submission come last.
    """
    order = {task.key: i for i, task in enumerate(observation.tasks)}
    records = sorted(
        observation.records,
        key=lambda record: (order.get((record.run, record.repeat), len(order)), record.started_at),
    )
    known = {run.id: run for each in observation.manifests for run in each.runs.values()}
    return [
        TaskState(known.get(record.run) or _run(record), record.repeat, record.status, record)
        for record in records
    ]


def attempt_columns(observation: Observation, chosen: list[TaskState]) -> dict[str, list[str]]:
    """Return the columns of a list of attempts: cells by header.

    The columns are the run, the parameters that vary, when and where the attempt was executed, its
    median times by phase, whether tables show it, and why. Times with several ranks are those of
    the slowest rank. `chosen` are from `attempts_of`.
    """
    records = [task.record for task in chosen if task.record is not None]
    selection = select_attempts(observation.records, observation.source_hashes)
    shown = {id(result.record) for result in list_results(observation)}
    submitted = {task.key for task in observation.tasks}
    known = [run for manifest in observation.manifests for run in manifest.runs.values()]
    old = superseded([*known, *map(_run, observation.records)])
    runs = {"run": [record.run for record in records]}
    if len({record.benchmark for record in records}) > 1:
        runs["benchmark"] = [record.benchmark for record in records]
    about: dict[str, list[str]] = {
        "repeat": [str(record.repeat) for record in records],
        "round": [str(record.block.round) if record.block else "" for record in records],
        "attempt": [str(record.attempt) for record in records],
        "status": [str(record.status) for record in records],
        "device": [record.device for record in records],
        **{name: [recorded_value(record, name) for record in records] for name in RECORDED},
        "started (UTC)": [format_utc(record.started_at, "%Y-%m-%d %H:%M:%S") for record in records],
        **_medians(records),
        "shown": ["yes" if id(record) in shown else "no" for record in records],
        "why": [
            selection.reason(record, id(record) in shown, submitted, old) for record in records
        ],
    }
    params: dict[str, list[str]] = {}
    for name in varying([task.run for task in chosen]):
        params[parameter_header(name, runs | about)] = [
            format_scalar(record.params[name]) if name in record.params else ""
            for record in records
        ]
    return runs | params | about


def _run(record: Record) -> Run:
    """Return the run of a record without a manifest. Its resources and its code are unknown."""
    return Run(
        record.run,
        record.benchmark,
        record.version,
        record.params,
        Shape(),
        timeout_s=0.0,
        checkout=record.checkout,
    )


def _medians(records: list[Record]) -> dict[str, list[str]]:
    """Return a column with the median times for each phase of the records."""
    measured = [record.measurements for record in records]
    phases = dict.fromkeys(phase for each in measured if each for phase in each.samples_ms)
    return {
        f"{phase} (ms)": [
            "" if each is None or (time := median_ms(each, phase)) is None else format_number(time)
            for each in measured
        ]
        for phase in phases
    }
