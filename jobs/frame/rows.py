"""The table under all tables: a row has what one attempt measured of one metric, in one phase.

Tables, plots, texts, exports and the report are queries of it. They group rows into cells, and a
`Cell` computes its number. Which attempts have rows is decided in `jobs.results.counting`, and how
a metric follows from a record in `jobs.frame.metrics`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np

from jobs.formatting import format_number, format_percent
from jobs.frame.metrics import Metric, metric_samples
from jobs.frame.predictions import predicted
from jobs.frame.results import Result
from jobs.frame.statistics import mean_interval, over_processes, statistic
from jobs.results.counting import allocation_of
from jobs.results.record import Record
from jobs.status import Status
from jobs.sweep.views import PREDICTED

Interval = tuple[float, float]  # lower and upper end
NO_VALUE = "–"  # text of a cell whose run does not have the metric
_WITHOUT_INTERVAL = ("min", "max", "mean_std")  # the interval is that of a mean


class Row(NamedTuple):
    """What one attempt measured of one metric in one phase, or why there is nothing.

    The result has the run, the repeat, the device and the status. Its record, if there is one, has
    the round, commit, source hash, host, GPUs and conditions.
    """

    result: Result
    metric: Metric
    phase: str  # "" if the metric has no phases
    samples: np.ndarray | None = None  # in the unit of the metric; None: there is no number
    text: str = ""  # instead of samples: a value that is text, or `NO_VALUE`
    failure: str = ""  # instead of samples: the status
    in_round: bool = False  # whether the samples are of a complete round of a block

    @property
    def record(self) -> Record | None:
        return self.result.record


def rows_of(results: Iterable[Result], metric: Metric, phases: Iterable[str]) -> Iterator[Row]:
    """Yield a row for each result and phase. Predictions do not need a record.

    Raises:
        TableError: if a prediction fails.
    """
    for result, phase in product(results, phases):
        if metric.name.startswith(PREDICTED):
            found, in_round = predicted(result.run, metric), False
        elif result.status is Status.ok and result.record is not None:
            found, in_round = metric_samples(result.record, metric, phase), result.in_round
        else:
            yield Row(result, metric, phase, failure=result.failure_text)
            continue
        if found is None or isinstance(found, str):
            yield Row(result, metric, phase, text=NO_VALUE if found is None else found)
        else:
            yield Row(result, metric, phase, found, in_round=in_round)


@dataclass(frozen=True)
class Cell:
    """The rows of one metric that have the same place in a table, and their numbers."""

    rows: list[Row]  # at least one
    statistic: str = "median"  # see `value`

    @property
    def metric(self) -> Metric:
        return self.rows[0].metric

    @cached_property
    def measured(self) -> list[Row]:
        """The rows with samples: one per process."""
        return [row for row in self.rows if row.samples is not None]

    @cached_property
    def samples(self) -> list[np.ndarray]:
        """The samples of each process."""
        return [row.samples for row in self.rows if row.samples is not None]

    @property
    def in_rounds(self) -> bool:
        """Whether all processes are of complete rounds of a block."""
        return bool(self.measured) and all(row.in_round for row in self.measured)

    @property
    def number(self) -> float | None:
        """The cell's own statistic, see `value`."""
        return self.value(self.statistic)

    def value(self, name: str) -> float | None:
        """Return a statistic, None without samples.

        In a block it is that of each process, and of these values the mean, minimum or maximum for
        these statistics, and the median for any other. Outside of blocks it is that of the samples
        of all repeats.
        """
        if not self.measured:
            return None
        if self.in_rounds:
            return statistic(self._by_process(name), over_processes(name))
        return statistic(self.pooled, name)

    @property
    def interval(self) -> Interval | None:
        """95% interval of the mean over processes.

        None outside of blocks, for statistics that are no estimate of a mean, and for values that
        are not times if all processes have the same.
        """
        if not self.in_rounds or self.statistic in _WITHOUT_INTERVAL:
            return None
        values = self._by_process(self.statistic)
        if not self.metric.is_timed and (values == values[0]).all():
            return None
        groups: dict[str, list[float]] = {}
        for record, value in zip(self.records, values.tolist(), strict=True):
            groups.setdefault(allocation_of(record), []).append(value)
        return mean_interval(list(groups.values()))

    @property
    def deviation(self) -> float | None:
        """Only for mean_std: that over processes, or over samples outside of blocks."""
        if self.statistic != "mean_std" or not self.measured:
            return None
        return statistic(self._by_process("mean") if self.in_rounds else self.pooled, "std")

    def _by_process(self, name: str) -> np.ndarray:
        """Return a statistic of the samples of each process, as an array `(processes,)`."""
        return np.array([statistic(samples, name) for samples in self.samples])

    @property
    def records(self) -> list[Record]:
        """The records of the processes."""
        return [row.record for row in self.measured if row.record is not None]

    @property
    def all_records(self) -> list[Record]:
        """The records of all rows, also of failed attempts."""
        return [row.record for row in self.rows if row.record is not None]

    @property
    def texts(self) -> list[str]:
        return [row.text for row in self.rows if row.text]

    @property
    def pooled(self) -> np.ndarray:
        """The samples of all processes. There must be at least one."""
        return self.samples[0] if len(self.samples) == 1 else np.concatenate(self.samples)

    @property
    def spread(self) -> float:
        """Width of the interval, or interquartile range of samples, relative to the number.

        0 without a number, and in blocks without an interval.
        """
        if self.interval is not None and self.number:
            return (self.interval[1] - self.interval[0]) / abs(self.number)
        has_samples = self.measured and not self.in_rounds
        return abs(statistic(self.pooled, "spread")) if has_samples else 0.0

    def text(self, with_interval: bool = True) -> str:
        """Return the text of the cell, such as `0.2740 ±0.4%`.

        The text is the number. It is followed by half of the interval relative to its middle, and
        by a note if some repeats failed. Without a number, the text is a status such as `timeout`,
        a value that is text, or a dash.
        """
        failures = [row.failure for row in self.rows if row.failure]
        if self.number is None:
            return ", ".join(dict.fromkeys([*self.texts, *failures]))
        text = format_number(self.number)
        if self.deviation is not None:
            text += f" ± {format_number(self.deviation)}"
        low, high = self.interval or (0.0, 0.0)
        if with_interval and low + high:
            text += f" ±{format_percent((high - low) / abs(low + high))}"
        if failures:
            ok, total = len(self.measured), len(self.measured) + len(failures)
            text += f" ({ok} of {total} repeats; {', '.join(dict.fromkeys(failures))})"
        return text
