"""Estimates how long a planned submission takes, from the records of earlier runs."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jobs.block import trial_runs
from jobs.formatting import format_number, relative
from jobs.launch.plan_submission import Prepared
from jobs.results.latest import LOGS, folders_in
from jobs.results.record import Record
from jobs.results.record_reader import iter_records
from jobs.results.unreadable import UnreadableResults
from jobs.run import Run


@dataclass(frozen=True)
class ExpectedTime:
    """The expected time of some runs that are executed one after another."""

    minutes: float
    gpu_hours: float
    known: int  # number of runs with an earlier time
    folders: list[Path]  # the results folders of these times

    @property
    def time_text(self) -> str:
        """The time as text, in seconds if it is below one minute."""
        minutes = self.minutes
        if minutes < 1:
            return f"{minutes * 60:.0f} s"
        return f"{minutes:.{0 if minutes >= 10 else 1}f} min"

    @property
    def gpu_text(self) -> str:
        """The GPU-hours with a comma before them. Empty if the runs need no GPUs."""
        return f", {format_number(self.gpu_hours, 2)} GPU-hours" if self.gpu_hours else ""


@dataclass(frozen=True)
class EarlierTimes:
    """Run times of earlier runs that ended as ok, and the results folders that have them.

    The run times in a block are not equal: its trial takes longer than its rounds, or less long.
    This is why the mean over the records of a run is used, also those of trials.
    """

    by_point: dict[str, tuple[float, Path]]  # mean in seconds; see `_point`

    @classmethod
    def of(cls, prepared: Prepared) -> EarlierTimes:
        """Read how long the runs of a planned submission took before.

        The times in its results folder count first. For the other runs, one further folder counts:
        the folder in ./logs with the name of the sweep and with times of the most runs. The times
        of two further folders are not mixed, because they can be of different devices.
        """
        manifest = prepared.manifest
        if not manifest.jobs:
            return cls({})
        wanted = {_point(run) for run in manifest.runs.values()}
        own = manifest.folder.resolve()
        others: set[Path] = set()
        with suppress(UnreadableResults):
            named = (path for path in folders_in(LOGS) if path.name == manifest.sweep.name)
            others = {path.resolve() for path in named} - {own}
        found = [_times(folder, wanted) for folder in sorted(others)]
        here = _times(own, wanted)
        return cls(here | max(found, key=len, default={}) | here)

    def expected(self, runs: list[Run]) -> ExpectedTime | None:
        """Return the expected time of some runs, each of which may occur several times.

        A run without an earlier time counts as the mean of the others. None if no run has one.
        """
        times = [self.by_point.get(_point(run)) for run in runs]
        known = [one for one in times if one is not None]
        if not known:
            return None
        mean = sum(seconds for seconds, _ in known) / len(known)
        seconds = [mean if one is None else one[0] for one in times]
        gpus = [run.shape.nodes * run.shape.gpus_per_node for run in runs]
        gpu_seconds = sum(one * count for one, count in zip(seconds, gpus, strict=True))
        used = {folder for _, folder in known}
        folders = list(dict.fromkeys(f for _, f in self.by_point.values() if f in used))
        return ExpectedTime(sum(seconds) / 60, gpu_seconds / 3600, len(known), folders)


def _times(folder: Path, wanted: set[str]) -> dict[str, tuple[float, Path]]:
    """Return the mean run time of each wanted point in a results folder. Empty if unreadable."""
    times: dict[str, list[float]] = {}
    with suppress(UnreadableResults):  # another folder must not stop the submission
        for record in iter_records(folder):
            if isinstance(record, Record) and record.status == "ok":
                point = _point(record)
                times.setdefault(point, []).append(record.finished_at - record.started_at)
    return {p: (sum(found) / len(found), folder) for p, found in times.items() if p in wanted}


def expected_text(prepared: Prepared, earlier: EarlierTimes) -> str:
    """Return an estimate of the total run time of a planned submission, as text."""
    manifest = prepared.manifest
    wanted = [
        manifest.runs[run]
        for job in manifest.jobs
        for run in (*(run for run, _ in job.tasks), *trial_runs(job.tasks, manifest.blocks))
    ]
    if not wanted:
        return "nothing to run"
    expected = earlier.expected(wanted)
    if expected is None:
        return "unknown: these runs have no earlier records"
    folders = " and ".join(str(relative(folder)) for folder in expected.folders)
    return (
        f"{expected.time_text} of run time{expected.gpu_text} (from records of {expected.known} of "
        f"{len(wanted)} runs in {folders})"
    )


def _point(of: Run | Record) -> str:
    """Return a key that is equal for runs and records with the same benchmark and parameters.

    The key does not contain the version of the benchmark, because a new version hardly changes the
    run time.
    """
    return json.dumps([of.benchmark, of.params], sort_keys=True)
