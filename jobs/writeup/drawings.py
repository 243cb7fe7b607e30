"""The pictures of a study's runs that the document shows."""

from __future__ import annotations

from dataclasses import dataclass

from jobs.errors import TableError
from jobs.formatting import format_scalar
from jobs.frame.results import Result, with_artifacts
from jobs.report.run_pictures import RunPicture, pictures_of
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
        content, name = self.picture.content, self.picture.name.replace("_", " ")
        what = name if isinstance(content, bytes) else content.title
        more = ", ".join(part for part in self.label.split(", ") if part not in what)
        return f"{self.study.name}: {what} ({more})" if more else f"{self.study.name}: {what}"

    @property
    def name(self) -> str:
        """A name for its file, without suffix."""
        parts = [self.study.name, self.picture.name, self.label[:120], self.record.run[:8]]
        return "-".join(filter(None, parts))


def drawings_of(
    study: Study, name: str | None, where: str | None
) -> tuple[list[Drawing], list[str]]:
    """Return the pictures of the shown runs of a study, and what is wrong with those left out.

    They are in the order of the sweep. Of several executions of a run, those of the first count.

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
    left_out: list[str] = []
    for result, record in with_artifacts(results, study.observation.records):
        pictures, problems = pictures_of(record, study.folder_of(record))
        left_out += [f"A picture is left out: {problem}" for problem in problems]
        for picture in pictures:
            if name is None or picture.name == name:
                found.setdefault((result.run.id, picture.name), (result, record, picture))
    differing = varying([result.run for result, _, _ in found.values()])
    drawings = [
        Drawing(study, record, _label(result, differing), picture)
        for result, record, picture in found.values()
    ]
    return drawings, left_out


def _label(result: Result, differing: list[str]) -> str:
    params = result.run.params
    return ", ".join(f"{name} {format_scalar(params.get(name))}" for name in differing)
