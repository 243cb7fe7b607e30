"""Figures that runs have drawn: PNG files, and their data if the run has kept it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jobs.errors import TableError
from jobs.formatting import format_scalar
from jobs.frame.results import Result
from jobs.report.views import select
from jobs.results.record import Record
from jobs.run import varying
from jobs.sweep.views import Table
from jobs.writeup.studies import Study
from systems.plot_data import SUFFIX, Spans, Stack, read_figure


@dataclass(frozen=True)
class Drawing:
    """A figure that a run has drawn."""

    study: Study
    record: Record
    label: str  # parameters and device in which the run differs from others with this figure
    png: Path
    data: Stack | Spans | None  # None: the run has kept no data, or they are not valid

    @property
    def title(self) -> str:
        """What the figure shows, and in which run."""
        what = self.data.title if self.data else self.png.stem.replace("_", " ")
        more = ", ".join(part for part in self.label.split(", ") if part not in what)
        return f"{what} ({more})" if more else what


def drawings_of(study: Study, name: str | None, where: str | None) -> list[Drawing]:
    """Return the figures that the shown runs of a study have drawn, in the order of the sweep.

    Of several executions of a run on one kind of device, the figures of the first are returned.

    Args:
        name: file name without suffix. None: all.
        where: condition on the runs. None: all.
    """
    results = study.results
    if where is not None:
        benchmarks = dict.fromkeys(result.run.benchmark for result in results)
        chosen = []
        for benchmark in benchmarks:
            try:
                view = Table(name="figures", benchmark=benchmark, where=where)
                chosen += select(study.observation, view, results).results
            except TableError:  # this benchmark has no such parameter
                continue
        results = chosen
    found: dict[tuple[str, str, str], tuple[Result, Path]] = {}
    for result in results:
        if result.record is None or result.record.artifacts is None:
            continue
        for path in _pngs(study.folder_of(result.record) / result.record.artifacts):
            if name is None or path.stem == name:
                key = result.run.id, result.device, path.stem
                found.setdefault(key, (result, path))
    differing = varying([result.run for result, _ in found.values()])
    several = len({device for _, device, _ in found}) > 1
    return [_drawing(study, result, path, differing, several) for result, path in found.values()]


def _pngs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.png")) if folder.is_dir() else []


def _drawing(
    study: Study, result: Result, png: Path, differing: list[str], with_device: bool
) -> Drawing:
    assert result.record is not None
    params = result.run.params
    parts = [f"{name} {format_scalar(params.get(name))}" for name in differing]
    label = ", ".join([*parts, *([result.device] if with_device else [])])
    path = png.with_name(png.stem + SUFFIX)
    data = None
    if path.is_file():
        try:
            data = read_figure(path)
        except ValueError:  # of another version, or damaged: the PNG file is shown
            data = None
    return Drawing(study, result.record, label, png, data)
