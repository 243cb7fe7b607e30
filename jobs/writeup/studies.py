"""The results from which a document is built: one study per sweep, from one or several folders."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jobs.report.results import Result, list_results
from jobs.report.views import plots_of, tables_of
from jobs.results.record import Record
from jobs.results.run_states import Observation, TaskKey, TaskState, observe
from jobs.results.stale import with_stale
from jobs.sweep.load import load_sweep
from jobs.sweep.schema import Plot, Sweep, Table

STOCK = Path(__file__).resolve().parents[2] / "sweeps"
SMALL = "cpu-"  # prefix of the names of the small variants in sweeps/cpu


@dataclass(frozen=True)
class Study:
    """Results of one sweep from all folders, with the tables and plots that the sweep declares."""

    name: str  # name of the sweep file in the folder sweeps, or of the user's own sweep
    sweep: Sweep
    observation: Observation
    results: list[Result]
    folders: dict[str, Path]  # results folder of each submission, by its id
    stale: dict[Path, frozenset[TaskKey]]  # tasks with results of older code, by results folder
    is_stock: bool  # whether the sweep is one of this project

    @property
    def tables(self) -> dict[str, Table]:
        return {table.name: table for table in tables_of(self.sweep)}

    @property
    def plots(self) -> dict[str, Plot]:
        return {plot.name: plot for plot in plots_of(self.sweep)}

    def on(self, device: str) -> Study:
        """Return the study with only the results of one kind of GPU, of CPUs, and missing ones."""
        records = [record for record in self.observation.records if is_of(record, device)]
        return replace(
            self,
            observation=replace(self.observation, records=records),
            results=[result for result in self.results if is_of(result, device)],
        )

    def is_stale(self, record: Record) -> bool:
        """Return whether a record is of older code than the present one."""
        return (record.run, record.repeat) in self.stale[self.folder_of(record)]

    def folder_of(self, record: Record) -> Path:
        """Return the results folder of a record."""
        return self.folders.get(record.submission, self.observation.folder)


def is_of(result: Result | Record, device: str | None) -> bool:
    """Return whether a result counts for a kind of GPU: its own, those of CPUs and missing ones.

    A study can have runs on CPUs beside those on GPUs.
    """
    return result.device in (device, "") or result.device.startswith("cpu:")


def results_folders(given: Iterable[Path]) -> list[Path]:
    """Return the results folders among some folders and their direct subfolders.

    Raises:
        FileNotFoundError: if a folder does not exist, or neither it nor a subfolder has results.
    """
    found: list[Path] = []
    for folder in given:
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a folder")
        inside = [each for each in (folder, *sorted(folder.iterdir())) if _has_results(each)]
        if not inside:
            raise FileNotFoundError(
                f"{folder} is not a results folder and contains none (a results folder has a "
                "subfolder submissions)"
            )
        found += inside
    return list(dict.fromkeys(path.resolve() for path in found))


def shown_path(folder: Path) -> str:
    """Return the path of a folder, relative to the current folder if it is inside."""
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)


def _has_results(folder: Path) -> bool:
    return (folder / "submissions").is_dir()


def read_studies(folders: Iterable[Path]) -> tuple[dict[str, Study], list[str]]:
    """Read results folders. Folders of the same sweep are one study.

    Args:
        folders: results folders.

    Returns:
        The studies by name, and notes on what could not be read.

    Raises:
        UnreadableResults: if the submissions or records of a folder cannot be read.
    """
    by_name: dict[str, list[Observation]] = {}
    notes: list[str] = []
    for folder in folders:
        observation = with_stale(observe(folder))
        notes += [
            f"{shown_path(folder)}: {note}" for note in (*observation.bad_lines, *observation.notes)
        ]
        name = observation.manifests[-1].sweep.name.removeprefix(SMALL)
        by_name.setdefault(name, []).append(observation)
    return {name: _study(name, found) for name, found in by_name.items()}, notes


def _study(name: str, observations: Sequence[Observation]) -> Study:
    stock = STOCK / f"{name}.yaml"
    is_stock = "/" not in name and stock.is_file()
    observation = merged(observations)
    return Study(
        name,
        load_sweep(stock).sweep if is_stock else observation.manifests[-1].sweep,
        observation,
        _submitted(list_results(observation), observations),
        {manifest.id: each.folder for each in observations for manifest in each.manifests},
        {each.folder: each.stale for each in observations},
        is_stock,
    )


def _submitted(results: list[Result], observations: Sequence[Observation]) -> list[Result]:
    """Return the results without those of tasks that no folder of their kind of device has.

    A folder of another GPU may have only a part of the sweep. The rest does not count as missing.
    """
    tasks: dict[str, set[TaskKey]] = {}  # tasks of all folders with a kind of device
    for each in observations:
        for device in {record.device for record in each.records}:
            tasks.setdefault(device, set()).update(task.key for task in each.tasks)
    return [
        result
        for result in results
        if result.record is not None
        or result.device not in tasks
        or (result.run.id, result.repeat) in tasks[result.device]
    ]


def merged(observations: Sequence[Observation]) -> Observation:
    """Return the observation of several results folders of one sweep as one.

    If several folders have a run, its state is that of the first folder with a record of it.
    """
    first, *others = observations
    if not others:
        return first
    tasks: dict[tuple[str, int], TaskState] = {}
    for each in observations:
        for task in each.tasks:
            known = tasks.get(task.key)
            if known is None or (known.record is None and task.record is not None):
                tasks[task.key] = task
    return replace(
        first,
        manifests=[manifest for each in observations for manifest in each.manifests],
        records=[record for each in observations for record in each.records],
        bad_lines=[line for each in observations for line in each.bad_lines],
        tasks=list(tasks.values()),
        notes=[note for each in observations for note in each.notes],
        stale=frozenset(key for each in observations for key in each.stale),
    )
