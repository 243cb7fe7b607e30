"""The pictures of a study's runs that the document shows."""

from __future__ import annotations

from dataclasses import dataclass

from jobs.errors import TableError
from jobs.formatting import format_scalar
from jobs.frame.results import Result, with_artifacts
from jobs.report.run_pictures import RunPicture, pictures_in
from jobs.report.views import select
from jobs.results.record import Record
from jobs.run import varying
from jobs.sweep.views import Table
from jobs.writeup.studies import Study


@dataclass(frozen=True)
class Drawing:
    """A picture of a run."""

    study: Study
    record: Record
    label: str  # parameters in which the run differs from others with this picture
    picture: RunPicture

    @property
    def title(self) -> str:
        """What the picture shows, and of which run."""
        data = self.picture.data
        what = data.title if data else self.picture.name.replace("_", " ")
        more = ", ".join(part for part in self.label.split(", ") if part not in what)
        return f"{self.study.name}: {what} ({more})" if more else f"{self.study.name}: {what}"

    @property
    def name(self) -> str:
        """A name for its file, without suffix."""
        parts = [self.study.name, self.picture.name, self.label[:120], self.record.run[:8]]
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
    found: dict[tuple[str, str], tuple[Result, Record, RunPicture]] = {}
    for result, record in with_artifacts(results, study.observation.records):
        for picture in pictures_in(study.folder_of(record) / str(record.artifacts)):
            if name is None or picture.name == name:
                found.setdefault((result.run.id, picture.name), (result, record, picture))
    differing = varying([result.run for result, _, _ in found.values()])
    return [
        Drawing(study, record, _label(result, differing), picture)
        for result, record, picture in found.values()
    ]


def _label(result: Result, differing: list[str]) -> str:
    params = result.run.params
    return ", ".join(f"{name} {format_scalar(params.get(name))}" for name in differing)
