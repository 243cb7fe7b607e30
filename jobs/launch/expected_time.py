"""Estimates how long a planned submission takes, from the records of earlier runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jobs.block import FEWEST_ROUNDS, in_blocks, trial_runs
from jobs.formatting import format_number, relative
from jobs.results.latest import LOGS, folders_in
from jobs.results.manifest import Manifest
from jobs.results.record import Record
from jobs.results.record_reader import read_records
from jobs.results.unreadable import UnreadableResults
from jobs.run import Run


@dataclass(frozen=True)
class EarlierTimes:
    """Run times of earlier runs that ended as ok, and the results folder that has them."""

    by_point: dict[str, float]  # mean in seconds; see `_point`
    folder: Path

    @classmethod
    def of(cls, manifest: Manifest) -> EarlierTimes:
        """Read how long the runs of a planned submission took before.

        The times in its results folder count, or if it has none, those of the folder in ./logs with
        the name of the sweep and with times of the most runs.
        """
        wanted = {_point(run) for run in manifest.runs.values()}

        def times(folder: Path) -> dict[str, float]:
            with suppress(UnreadableResults):  # another folder must not stop the submission
                found = mean_times(read_records(folder)[0], _point)
                return {point: found[point] for point in found.keys() & wanted}
            return {}

        found = [(times(manifest.folder), manifest.folder)]
        if not found[0][0]:
            with suppress(UnreadableResults):
                named = (path for path in folders_in(LOGS) if path.name == manifest.sweep.name)
                found += [(times(folder), folder) for folder in sorted(named)]
        return cls(*max(found, key=lambda one: len(one[0])))

    def cost(self, runs: list[Run], fewest: list[Run] | None = None) -> str | None:
        """Return the expected time and GPU-hours of runs, one after another. None: unknown.

        With `fewest`, it is the range from their cost to that of `runs`, which include them. A run
        without an earlier time counts as the mean of the others.
        """
        points = map(_point, runs)
        known = [self.by_point[point] for point in points if point in self.by_point]
        if not known:
            return None
        mean = sum(known) / len(known)
        times, hours = [], []
        for some in (runs if fewest is None else fewest, runs):
            seconds = [self.by_point.get(_point(run), mean) for run in some]
            gpus = [run.shape.gpus for run in some]
            times.append(_time_text(sum(seconds)))
            hours.append(sum(one * count for one, count in zip(seconds, gpus, strict=True)) / 3600)
        text = " to ".join(dict.fromkeys(times))
        if hours[-1] > 0:
            text += f", {' to '.join(dict.fromkeys(format_number(h, 2) for h in hours))} GPU-hours"
        return text


def _time_text(seconds: float) -> str:
    """Return a time as text, in seconds if it is below one minute."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.{0 if seconds >= 600 else 1}f} min"


def mean_times(
    records: Iterable[Record], key: Callable[[Record], str] = lambda record: record.run
) -> dict[str, float]:
    """Return the mean time of the successful attempts of runs, in seconds, by run id or `key`.

    Trials count too: the run times in a block are not equal.
    """
    times: dict[str, list[float]] = {}
    for record in records:
        if record.status == "ok":
            times.setdefault(key(record), []).append(record.finished_at - record.started_at)
    return {run: sum(found) / len(found) for run, found in times.items()}


def expected_text(manifest: Manifest, earlier: EarlierTimes) -> str:
    """Return an estimate of the total run time of a planned submission, as text.

    It is a range if workers choose the number of rounds. Trials count as whole ones, although a
    worker leaves out runs that were tried on its GPUs.
    """
    runs, most, least = manifest.runs, list[Run](), list[Run]()
    for job in manifest.jobs:
        trials = [runs[run] for run in trial_runs(job.tasks, manifest.blocks)]
        most += trials
        least += trials
        for block, tasks in in_blocks(job.tasks, manifest.blocks):
            for task in tasks:
                most.append(runs[task[0]])
                if block is None or not block.auto or block.round_of(task) < FEWEST_ROUNDS:
                    least.append(runs[task[0]])
    if not most:
        return "nothing to run"
    known = sum(_point(run) in earlier.by_point for run in most)
    cost = earlier.cost(most, least)
    if cost is None:
        return "unknown: these runs have no earlier records"
    of = f"{known} of {len(most)} runs in {relative(earlier.folder)}"
    return f"{cost}, one run after another (from records of {of})"


def _point(of: Run | Record) -> str:
    """Return a key that is equal for runs and records with the same benchmark and parameters.

    It lacks the version of the benchmark, because a new version hardly changes the run time, and
    parameters that are null, because a benchmark may have got them since.
    """
    given = {name: value for name, value in of.params.items() if value is not None}
    return json.dumps([of.benchmark, given], sort_keys=True)
