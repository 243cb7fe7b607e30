"""The results from which a document is built: one study per sweep, from one or several folders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from jobs import ROOT
from jobs.formatting import relative
from jobs.frame.results import Result, list_results
from jobs.report.views import plots_of, tables_of
from jobs.results.record import Record, is_stale, is_without_code, present_last
from jobs.results.run_states import Observation, TaskState, observe
from jobs.results.unreadable import UnreadableResults
from jobs.status import Status
from jobs.sweep.load import LoadedSweep, load_sweep
from jobs.sweep.run_sources import RunSources
from jobs.sweep.schema import Sweep
from jobs.sweep.views import Plot, Table

STOCK = ROOT / "sweeps"
SMALL = "cpu-"  # prefix of the names of the small variants in sweeps/cpu


@dataclass(frozen=True)
class Study:
    """Results of one sweep on one kind of device, from all folders with results of it."""

    name: str  # name of the sweep file in the folder sweeps, or of the user's own sweep
    sweep: Sweep
    observation: Observation
    results: list[Result]
    is_stock: bool  # whether the sweep is one of this project

    @property
    def tables(self) -> dict[str, Table]:
        return {table.name: table for table in tables_of(self.sweep)}

    @property
    def plots(self) -> dict[str, Plot]:
        return {plot.name: plot for plot in plots_of(self.sweep)}

    @property
    def is_small(self) -> bool:
        """Whether the last runs are of the small variant in sweeps/cpu."""
        return self.observation.manifests[-1].sweep.name.startswith(SMALL)

    def is_stale(self, record: Record) -> bool:
        """Return whether a record is of older code than the present one."""
        return is_stale(record, self.observation.source_hashes)

    def is_without_code(self, record: Record) -> bool:
        """Return whether the present code of a record is not found."""
        return is_without_code(record, self.observation.source_hashes)

    def folder_of(self, record: Record) -> Path:
        """Return the results folder of a record."""
        folders = {manifest.id: manifest.folder for manifest in self.observation.manifests}
        return folders.get(record.submission, self.observation.folder)


Studies = dict[str, dict[str, Study]]  # by kind of device ("" if none is known) and name


class Registry:
    """The records that a document shows, numbered in the order of their first use."""

    def __init__(self) -> None:
        self.entries: list[tuple[Study, Record]] = []
        self._numbers: dict[int, int] = {}  # by identity of the record

    def number(self, study: Study, record: Record) -> int:
        """Return the number of a record. A record that is not known gets the next number."""
        known = self._numbers.get(id(record))
        if known is None:
            known = self._numbers[id(record)] = len(self.entries)
            self.entries.append((study, record))
        return known


def read_studies(folders: Iterable[Path]) -> tuple[Studies, list[str]]:
    """Read results folders. Folders of the same sweep are one study.

    Returns:
        The studies by kind of device and name, and notes on what could not be read.

    Raises:
        UnreadableResults: if the submissions or records of no folder can be read.
    """
    by_name: dict[str, list[Observation]] = {}
    notes: list[str] = []
    unreadable: list[UnreadableResults] = []
    sources = RunSources()
    for folder in folders:
        try:
            observation = observe(folder, sources)
        except UnreadableResults as error:
            notes.append(f"{relative(folder)}: not in this report: {error}")
            unreadable.append(error)
            continue
        by_name.setdefault(_name_of(observation, by_name), []).append(observation)
    if unreadable and not by_name:
        raise unreadable[0]
    studies: Studies = {}
    for name, found in by_name.items():
        notes += [
            f"{relative(each.folder)}: {note}"
            for each in found
            for note in (*each.bad_lines, *each.notes)
        ]
        for device, seen in _devices(found).items():
            studies.setdefault(device, {})[name] = _study(name, _merged(seen, device))
    return studies, notes


def _name_of(observation: Observation, known: Mapping[str, Sequence[Observation]]) -> str:
    """Return the name of the study to which a results folder belongs.

    Another sweep of the same name is a study of its own, with the folder in its name.
    """
    sweep = observation.manifests[-1].sweep
    name = sweep.name.removeprefix(SMALL)
    stock = _stock_sweep(name)
    if stock is not None:
        benchmarks = {task.run.benchmark for task in observation.tasks}
        is_known = not benchmarks.isdisjoint(stock.benchmarks.by_name)
    else:
        others = [each.manifests[-1].sweep for each in known.get(name, ())]
        is_known = all(
            (other.benchmark, other.tables, other.plots)
            == (sweep.benchmark, sweep.tables, sweep.plots)
            for other in others
        )
    return name if is_known else f"{name} ({relative(observation.folder)})"


@cache
def _stock_sweep(name: str) -> LoadedSweep | None:
    """Return the sweep of this project with a name, or None."""
    path = STOCK / f"{name}.yaml"
    return load_sweep(path) if "/" not in name and path.is_file() else None


def _study(name: str, observation: Observation) -> Study:
    stock = _stock_sweep(name)
    sweep = observation.manifests[-1].sweep if stock is None else stock.sweep
    return Study(name, sweep, observation, list_results(observation), stock is not None)


def _devices(observations: Sequence[Observation]) -> dict[str, list[Observation]]:
    """Return the folders by kind of GPU that executed a run, or of CPU if there is no GPU."""
    found: dict[str, list[Observation]] = {}
    for each in observations:
        for device in dict.fromkeys(r.device for r in each.records if r.status in ("ok", "oom")):
            found.setdefault(device, []).append(each)
    gpus = {name: seen for name, seen in found.items() if not name.startswith("cpu:")}
    return gpus or found or {"": list(observations)}


def _merged(folders: Sequence[Observation], device: str) -> Observation:
    """Return the results folders of one sweep as one, without the records of other kinds of GPU.

    A sweep can have runs that need no GPU. Their records of CPUs count for the GPU of the folder.
    If several folders have a run, its state is that of the first folder with a record of it.
    """

    def counts(record: Record) -> bool:
        is_of_host = record.device.startswith("cpu:") and not device.startswith("cpu:")
        return not device or record.device == device or is_of_host

    tasks: dict[tuple[str, int], TaskState] = {}
    for task in (task for each in folders for task in each.tasks):
        if task.record is not None and not counts(task.record):
            task = replace(task, record=None, status=Status.missing)
        known = tasks.get(task.key)
        if known is None or (known.record is None and task.record is not None):
            tasks[task.key] = task
    hashes = dict(item for each in folders for item in each.source_hashes.items())
    records = [record for each in folders for record in each.records if counts(record)]
    return replace(
        folders[0],
        manifests=[manifest for each in folders for manifest in each.manifests],
        records=present_last(records, hashes),
        tasks=list(tasks.values()),
        source_hashes=hashes,
    )
