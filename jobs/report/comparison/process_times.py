"""Reads results folders with one time per process and phase, instead of all samples.

The process is the unit of a comparison. Its time is the median of its samples. Two folders with
100,000 records each fit into 1 GB of memory in this form.
"""

from __future__ import annotations

import signal
from array import array
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, fields
from functools import partial
from multiprocessing import get_context
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from jobs.errors import CommandError
from jobs.frame.results import Result, list_results
from jobs.report.comparison.paired import median_ms
from jobs.results.counting import executions_of, is_complete
from jobs.results.record import Measurements, Record
from jobs.results.run_states import Observation, observe
from jobs.results.unreadable import UnreadableResults
from jobs.run import Run
from jobs.status import Status

RunOnDevice = tuple[str, str]  # run id, name of the device


@dataclass(slots=True)
class ProcessTimes:
    """The results of all repeats of a run on one kind of device, in one folder."""

    statuses: list[Status] = field(default_factory=list)
    times_ms: dict[str, list[float]] = field(default_factory=dict)  # of processes, by phase
    gpus: set[tuple[str, ...]] = field(default_factory=set)  # UUIDs of each process; () without
    started_at: float = float("inf")  # of the first process, in seconds since the epoch
    finished_at: float = 0.0  # of the last process

    @property
    def is_measured(self) -> bool:
        return Status.ok in self.statuses

    def add(self, result: Result) -> None:
        """Add the result of a repeat."""
        self.statuses.append(result.status)
        record = result.record
        if record is None or record.measurements is None or result.status is not Status.ok:
            return
        for phase in record.measurements.samples_ms:
            time = process_time(record.measurements, phase)
            if time is not None:
                self.times_ms.setdefault(phase, []).append(time)
        self.gpus.add(tuple(sorted(str(gpu.get("uuid", "")) for gpu in record.gpus)))
        self.started_at = min(self.started_at, record.started_at)
        self.finished_at = max(self.finished_at, record.finished_at)


@dataclass(slots=True)
class FolderTimes:
    """The results in a folder, by run and kind of device."""

    folder: Path
    runs: dict[str, Run]
    results: dict[RunOnDevice, ProcessTimes]
    cut: list[Record]  # records of executions of which a part is not in this folder
    notes: list[str]
    records: int  # number of records in the folder
    margin: float | None  # the key `margin` of the latest sweep that has it

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle runs and results as tuples, which takes a third of the time."""
        runs = [_run_values(run) for run in self.runs.values()]
        results = [(key, _times_values(times)) for key, times in self.results.items()]
        others = (self.cut, self.notes, self.records, self.margin)
        return _unpickled, (self.folder, runs, results, *others)


_run_values = attrgetter(*(each.name for each in fields(Run)))
_times_values = attrgetter(*(each.name for each in fields(ProcessTimes)))


def _unpickled(
    folder: Path,
    runs: list[tuple[Any, ...]],
    results: list[tuple[RunOnDevice, tuple[Any, ...]]],
    *others: Any,
) -> FolderTimes:
    return FolderTimes(
        folder,
        {run.id: run for run in (Run(*values) for values in runs)},
        {key: ProcessTimes(*values) for key, values in results},
        *others,
    )


def read_short(folder: Path) -> Observation:
    """Read a results folder. Its records contain one time per phase, see `process_time`.

    Raises:
        CommandError: if the folder cannot be read.
    """
    try:
        return observe(folder, _shorten)
    except (FileNotFoundError, UnreadableResults) as error:
        raise CommandError(str(error)) from None


def process_time(measurements: Measurements, phase: str) -> float | None:
    """Return the median time of a phase in ms from a record that `read_short` returned."""
    times = measurements.samples_ms.get(phase)
    return None if times is None else float(times[0])  # type: ignore[arg-type]


def read_both(before: Path, after: Path) -> tuple[FolderTimes, FolderTimes]:
    """Read two results folders at the same time, in two processes.

    Raises:
        CommandError: if a folder cannot be read.
    """
    default = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # Ctrl-C: no traceback
    with ProcessPoolExecutor(1, get_context("fork"), default) as other:
        reading = other.submit(_read, before)
        second = _read(after)
        try:
            first = reading.result()
        except BrokenProcessPool:
            first = f"{before} cannot be read: the process that read it was killed"
    if isinstance(first, str):
        raise CommandError(first)
    if isinstance(second, str):
        raise CommandError(second)
    return first, second


def _read(folder: Path) -> FolderTimes | str:
    """Return the results in a folder, or an error message."""
    try:
        return folder_times(read_short(folder))
    except CommandError as error:
        return str(error)


def folder_times(observation: Observation) -> FolderTimes:
    """Return the results in a folder that `read_short` read."""
    results: dict[RunOnDevice, ProcessTimes] = {}
    runs: dict[str, Run] = {}
    for result in list_results(observation):
        runs[result.run.id] = result.run
        key = (result.run.id, result.device)
        times = results.get(key)
        if times is None:
            times = results[key] = ProcessTimes()
        times.add(result)
    return FolderTimes(
        observation.folder,
        runs,
        results,
        [
            record
            for execution in executions_of(observation.records)
            if not is_complete(execution)
            for record in execution
        ],
        [*map(str, observation.bad_lines), *observation.notes],
        len(observation.records),
        sweep_margin(observation),
    )


def sweep_margin(observation: Observation) -> float | None:
    """Return the key `margin` of the latest sweep of a folder that has it."""
    keys = (manifest.sweep.blocks for manifest in reversed(observation.manifests))
    return next((blocks.margin for blocks in keys if blocks and blocks.margin is not None), None)


def _shorten(record: Record) -> None:
    """Replace the samples of each phase by their median, and remove what is not compared."""
    record.conditions.clear()
    measurements = record.measurements
    if measurements is None:
        return
    measurements.facts.clear()
    samples_ms: dict[str, Any] = measurements.samples_ms
    for phase, samples in samples_ms.items():
        if isinstance(samples, array):
            samples_ms[phase] = array("d", [_median(samples)])
        else:
            samples_ms[phase] = array("d", [median_ms(measurements, phase)])


def _median(samples: array[float]) -> float:
    """Return the median of some samples, and sort them.

    The result is that of `median_ms`. To sort the samples in place takes a third of the time, which
    is 2 s for two folders with 100,000 records each.
    """
    np.frombuffer(samples).sort()
    low, high = samples[(len(samples) - 1) // 2], samples[len(samples) // 2]
    return low + 0.5 * (high - low)
