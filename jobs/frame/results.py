"""Lists the results in a results folder: one for each run, repeat and kind of device.

A kind of device is a GPU model or a type of CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jobs.block import FEWEST_ROUNDS, TaskKey
from jobs.errors import TableError
from jobs.results.counting import Selection, is_thrown_away, select_attempts, tried
from jobs.results.record import Measurements, Record
from jobs.results.run_states import Observation, TaskState
from jobs.status import Status
from jobs.sweep.benchmarks import NoBenchmark, load_benchmark
from jobs.sweep.views import PSEUDO

Key = tuple[Any, ...]  # identifies a row or column of a table: one value per dimension


@dataclass(frozen=True, slots=True)
class Result(TaskState):
    """Result of one repeat of a run on one kind of device, such as a GPU model.

    Its record is of this kind of device. If it has none, `detail` says why.
    """

    device: str = ""  # "" if unknown
    in_round: bool = False  # whether the record is of a complete round of a block
    trial: Record | None = None  # that before the record, if this is the first round after it

    @property
    def measurements(self) -> Measurements | None:
        """Measurements of the record. None if there is no record, or if the run failed."""
        return self.record.measurements if self.record else None

    @property
    def artifacts(self) -> str | None:
        """The folder with the files of the run or its trial, relative to the results folder."""
        records = (record for record in (self.record, self.trial) if record is not None)
        return next((record.artifacts for record in records if record.artifacts is not None), None)

    @property
    def failure_text(self) -> str:
        """Text for the cell of a failed or missing run, such as `OOM (41.2 GiB)` or `timeout`."""
        if self.status != "oom":
            return self.status
        failure = self.failure
        phase = f" in {failure.phase}" if failure is not None and failure.phase else ""
        if failure is None or failure.memory == "host":
            return f"OOM{phase} (host)"
        if failure.requested_bytes is None:
            return f"OOM{phase}"
        # The run needs at least the allocated memory plus the allocation that failed.
        needed = failure.requested_bytes + (failure.allocated_bytes or 0)
        return f"OOM{phase} ({needed / 2**30:.1f} GiB)"

    def coordinate(self, dimension: str, phase: str = "", metric: str = "") -> Any:
        """Return the value of this result in a dimension of a table: a parameter or one of PSEUDO.

        The phase and the metric are the values in the dimensions `phase` and `value`.
        """
        if dimension in PSEUDO:
            own = {"phase": phase, "value": metric, "device": self.device, "repeat": self.repeat}
            return own[dimension]
        return self.run.params[dimension]


def list_results(observation: Observation) -> list[Result]:
    """Return the results of every repeat of every run in a results folder.

    A folder can have records from several kinds of device, with a result for each, whose record
    `jobs.results.counting` selects. A run in blocks has a result for each allocation in which its
    round was executed. A result without a selected record is `missing`, or has the status of the
    job, such as `queued`. With `rounds: auto`, a round after the fewest that the worker did not
    reach is no result.

    The record of the first round of a run in an allocation gets the facts of its trial.
    """
    selection = select_attempts(observation.records, observation.source_hashes)
    trials = _add_facts_of_trials(observation.records, selection)
    devices_of: dict[str, set[str]] = {}
    for run, _, device in (*selection.shown, *selection.withheld):
        devices_of.setdefault(run, set()).add(device)
    later = _rounds_after_the_fewest(observation)
    results = []
    for task in observation.tasks:
        # `compare` shows the runs with another checkout.
        if task.run.checkout or task.status is Status.not_needed:
            continue
        if task.key in later and task.status in (Status.missing, Status.cancelled):
            continue
        place = task.run, task.repeat
        own = devices_of.get(task.run.id, set())
        devices = [
            device for device in selection.devices if device in own or _can_run_on(device, task)
        ]
        if not devices:
            results.append(_as_observed(task, task.record.device if task.record else ""))
        for device in devices:
            here = selection.shown.get((*task.key, device))
            withheld = selection.withheld.get((*task.key, device), "")
            why_not = "" if task.status.is_live else withheld
            if here is not None:
                for record in here:
                    in_round, trial = selection.is_in_round(record), trials.get(id(record))
                    found = Result(*place, record.status, record, "", device, in_round, trial)
                    results.append(found)
            elif not why_not and (len(devices) == 1 or task.record is None):
                results.append(_as_observed(task, device))
            else:
                results.append(Result(*place, Status.missing, None, why_not, device))
    return results


def _rounds_after_the_fewest(observation: Observation) -> set[TaskKey]:
    """Return the tasks of rounds that are executed only while a block is not decided."""
    blocks = [
        block for manifest in observation.manifests for block in manifest.blocks if block.auto
    ]
    return {t for block in blocks for t in block.all_tasks() if block.round_of(t) >= FEWEST_ROUNDS}


def _add_facts_of_trials(records: Sequence[Record], selection: Selection) -> dict[int, Record]:
    """Add the facts of a trial, such as those of its check, to the first shown round after it.

    The round has the same run, block, allocation and sources. Facts that it has itself are kept.
    Return each trial by the identity of the record of its round.
    """
    trials = {tried(record): record for record in records if is_thrown_away(record)}
    shown = [record for found in selection.shown.values() for record in found]
    shown = [record for record in shown if trials and selection.is_in_round(record)]
    found = {}
    for record in sorted(shown, key=lambda record: record.started_at):
        if (trial := trials.pop(tried(record), None)) is None:
            continue
        found[id(record)] = trial
        if trial.measurements is not None and record.measurements is not None:
            record.measurements.facts.update(trial.measurements.facts | record.measurements.facts)
    return found


def _as_observed(task: TaskState, device: str) -> Result:
    return Result(task.run, task.repeat, task.status, task.record, task.detail, device)


def _can_run_on(device: str, task: TaskState) -> bool:
    """Return whether a run can use a device: GPUs if it requests GPUs, otherwise CPUs."""
    on_cpu = not task.run.shape.gpus_per_node
    return device.startswith("cpu:") == on_cpu


def with_defaults(results: list[Result], benchmark: str, named: list[str]) -> list[Result]:
    """Return the results of a benchmark, in which all runs have the same parameters.

    Those that a run lacks, because the benchmark did not have them when the run was made, are added
    with their default values, also those in `named`, which a table or plot uses. Raises TableError
    if some must be added, and the benchmark cannot be imported.
    """
    names = dict.fromkeys(name for result in results for name in result.run.params)
    if names.keys() >= set(named) and all(len(r.run.params) == len(names) for r in results):
        return results
    try:
        defaults = load_benchmark(benchmark).json_defaults
    except NoBenchmark as error:
        raise TableError(str(error)) from error
    names |= dict.fromkeys(name for name in named if name in defaults)
    completed = []
    for result in results:
        params = {name: result.run.params.get(name, defaults.get(name)) for name in names}
        completed.append(replace(result, run=replace(result.run, params=params)))
    return completed
