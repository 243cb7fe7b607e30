"""Pictures that runs have drawn: PNG files, and their data if the run has kept it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jobs.errors import TableError
from jobs.formatting import format_scalar
from jobs.frame.results import Result, with_artifacts
from jobs.report.views import select
from jobs.results.record import Record
from jobs.run import varying
from jobs.sweep.views import Table
from jobs.writeup.studies import Study
from systems.plot_data import SUFFIX, Spans, Stack, read_figure


@dataclass(frozen=True)
class Drawing:
    """A picture that a run has drawn."""

    study: Study
    record: Record
    label: str  # parameters in which the run differs from others with this picture
    png: Path
    data: Stack | Spans | None  # None: the run has kept no data, or they are not valid

    @property
    def title(self) -> str:
        """What the figure shows, and in which run."""
        what = self.data.title if self.data else self.png.stem.replace("_", " ")
        more = ", ".join(part for part in self.label.split(", ") if part not in what)
        return f"{self.study.name}: {what} ({more})" if more else f"{self.study.name}: {what}"

    @property
    def name(self) -> str:
        """A name for its file, without suffix."""
        parts = [self.study.name, self.png.stem, self.label[:120], self.record.run[:8]]
        return "-".join(filter(None, parts))


def drawings_of(study: Study, name: str | None, where: str | None) -> list[Drawing]:
    """Return the pictures that the shown runs of a study have drawn, in the order of the sweep.

    Of several executions of a run, the pictures of the first are returned.

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
    found: dict[tuple[str, str], tuple[Result, Record, Path]] = {}
    for result, record in with_artifacts(results, study.observation.records):
        for path in _pngs(study.folder_of(record) / str(record.artifacts)):
            if name is None or path.stem == name:
                found.setdefault((result.run.id, path.stem), (result, record, path))
    differing = varying([result.run for result, _, _ in found.values()])
    return [_drawing(study, *each, differing) for each in found.values()]


def _pngs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.png")) if folder.is_dir() else []


def _drawing(
    study: Study, result: Result, record: Record, png: Path, differing: list[str]
) -> Drawing:
    params = result.run.params
    label = ", ".join(f"{name} {format_scalar(params.get(name))}" for name in differing)
    path = png.with_name(png.stem + SUFFIX)
    data = None
    if path.is_file():
        try:
            data = read_figure(path)
        except ValueError:  # of another version, or damaged: the PNG file is shown
            data = None
    return Drawing(study, record, label, png, data)
