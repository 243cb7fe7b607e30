"""One cell of a table: the values of a metric that one or several executions of a run measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jobs.formatting import format_number, format_percent
from jobs.report.metrics import Metric, metric_samples
from jobs.report.predictions import predicted
from jobs.report.results import Result
from jobs.report.statistics import mean_interval, statistic, statistic_of_rows
from jobs.results.counting import allocation_of
from jobs.results.record import Record
from jobs.sweep.schema import PREDICTED

Interval = tuple[float, float]  # lower and upper end
# How the values of several processes are reduced, by the statistic of the samples of a process.
# Means add up: a step minus the step without communication is the exposed communication.
_OVER_PROCESSES = {"mean": "mean", "mean_std": "mean", "min": "min", "max": "max"}
_WITHOUT_INTERVAL = ("min", "max", "mean_std")  # the interval is that of a mean


def over_processes(statistic_name: str) -> str:
    """Return the statistic over processes, for a statistic of the samples of each process."""
    return _OVER_PROCESSES.get(statistic_name, "median")


@dataclass(frozen=True, slots=True)
class Process:
    """Values of a metric that one execution of a run measured."""

    samples: np.ndarray
    record: Record | None  # None: the values are predicted
    in_round: bool  # whether the record is of a complete round of a block

    def value(self, statistic_name: str) -> float:
        return statistic(self.samples, statistic_name)


@dataclass(slots=True)
class Cell:
    """One cell of a table: a metric in one phase of a run, with the samples of all repeats.

    If the metric has no phases, the cell contains the values of the whole run.
    """

    metric: Metric
    processes: list[Process] = field(default_factory=list)  # one per successful repeat
    texts: list[str] = field(default_factory=list)  # values that are text, or a dash for no value
    failures: list[str] = field(default_factory=list)  # statuses of failed or missing repeats
    behind: list[Record] = field(
        default_factory=list
    )  # records of all repeats, also of failed ones

    def add(self, result: Result, phase: str) -> None:
        """Add one repeat of a run to the cell.

        If the repeat was successful, its values of the metric are added. Otherwise, its status is
        added. Predicted values are added even if the repeat was not successful.
        """
        if result.record is not None:
            self.behind.append(result.record)
        samples: np.ndarray | str | None
        record = None
        if self.metric.name.startswith(PREDICTED):
            samples = predicted(result.run, self.metric)
        elif result.status != "ok" or result.record is None:
            self.failures.append(result.failure_text)
            return
        else:
            record = result.record
            samples = metric_samples(record, self.metric, phase)
        if samples is None:
            self.texts.append("–")
        elif isinstance(samples, str):
            self.texts.append(samples)
        else:
            self.processes.append(Process(samples, record, record is not None and result.in_round))

    @property
    def records(self) -> list[Record]:
        """Records of the processes."""
        return [process.record for process in self.processes if process.record is not None]

    @property
    def all_samples(self) -> np.ndarray:
        """Samples of all successful repeats as one array. There must be at least one sample."""
        samples = [process.samples for process in self.processes]
        return samples[0] if len(samples) == 1 else np.concatenate(samples)

    @property
    def is_in_block(self) -> bool:
        """Whether all processes are of complete rounds of a block."""
        return bool(self.processes) and all(process.in_round for process in self.processes)

    def number(self, statistic_name: str) -> float | None:
        """Return a statistic, such as the median. None if there are no samples.

        The statistic of a run in a block is computed for each process. Of the values of the
        processes, the result is the mean, minimum or maximum for these statistics, and the median
        for any other. The statistic of any other run is that of the samples of all repeats.
        """
        if not self.processes:
            return None
        if not self.is_in_block:
            return statistic(self.all_samples, statistic_name)
        return statistic(self._values(statistic_name), over_processes(statistic_name))

    def interval(self, statistic_name: str) -> Interval | None:
        """Return the 95% interval of the mean over processes. See `statistics.mean_interval`.

        It is in the unit of the metric. None if the run was not measured in a block, for statistics
        that are no estimate of a mean, and for values that are not times if all processes have the
        same.
        """
        if not self.is_in_block or statistic_name in _WITHOUT_INTERVAL:
            return None
        values = self._values(statistic_name)
        if not self.metric.is_timed and (values == values[0]).all():
            return None
        groups: dict[str, list[float]] = {}
        for process, value in zip(self.processes, values.tolist(), strict=True):
            allocation = "" if process.record is None else allocation_of(process.record)
            groups.setdefault(allocation, []).append(value)
        return mean_interval(list(groups.values()))

    def text(self, statistic_name: str, with_interval: bool = True) -> str:
        """Return the text of the cell, such as `0.2740 ±0.4%`.

        The text is a statistic of the samples. It is followed by half of the interval relative to
        its middle, and by a note if some repeats failed. If there are no samples, the text is a
        status such as `timeout`, a value that is text, or a dash.
        """
        number = self.number(statistic_name)
        if number is None:
            return ", ".join(dict.fromkeys([*self.texts, *self.failures]))
        text = format_number(number)
        if statistic_name == "mean_std":
            text += f" ± {format_number(self._deviation())}"
        interval = self.interval(statistic_name) if with_interval else None
        if interval is not None and interval[0] + interval[1]:
            low, high = interval
            text += f" ±{format_percent((high - low) / abs(low + high))}"
        if self.failures:
            ok, total = len(self.processes), len(self.processes) + len(self.failures)
            text += f" ({ok} of {total} repeats; {', '.join(dict.fromkeys(self.failures))})"
        return text

    def _values(self, statistic_name: str) -> np.ndarray:
        """Return a statistic of the samples of each process, as an array `(processes,)`."""
        return np.array([process.value(statistic_name) for process in self.processes])

    def _deviation(self) -> float:
        """Return the standard deviation over processes, or over samples outside of blocks."""
        return statistic(self._values("mean") if self.is_in_block else self.all_samples, "std")


def numbers(cells: Sequence[Cell], statistic_names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return statistics of many cells, by name, as arrays `(cells,)`.

    The values are those of `Cell.number`, and NaN instead of None. Samples of cells that are not in
    blocks are reduced together, which takes a fifth of the time.
    """
    found = {name: np.full(len(cells), np.nan) for name in statistic_names}
    by_count: dict[int, list[tuple[int, np.ndarray]]] = {}  # by number of samples
    for i, cell in enumerate(cells):
        if cell.is_in_block:
            for name in statistic_names:
                found[name][i] = cell.number(name)
        elif cell.processes:
            samples = cell.all_samples
            by_count.setdefault(len(samples), []).append((i, samples))
    for rows in by_count.values():
        places = [i for i, _ in rows]
        samples = np.array([samples for _, samples in rows])
        for name in statistic_names:
            found[name][places] = statistic_of_rows(samples, name)
    return found
