"""The figures of the document: the plots of sweeps, and pictures that runs have drawn."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath

from jobs.errors import TableError
from jobs.report.images import unique_name
from jobs.report.plots import plot_figure, svg
from jobs.report.timelines import timeline_figure
from jobs.report.views import Shown, select
from jobs.sweep.views import Plot
from jobs.writeup.drawings import Drawing
from jobs.writeup.studies import Study


@dataclass
class ShownPlot:
    """A plot of the document, as its declaration."""

    study: Study
    plot: Plot

    @property
    def shown(self) -> Shown:
        """What the plot shows.

        Raises:
            TableError: if the plot names an unknown parameter or has an invalid condition.
        """
        return select(self.study.observation, self.plot, self.study.results)


@dataclass(frozen=True)
class DrawnFigure:
    """A figure as the content of a file."""

    title: str
    name: str  # of its file: SVG, or PNG if a run has kept no data of its picture
    content: bytes

    @property
    def media_type(self) -> str:
        return "image/svg+xml" if PurePath(self.name).suffix == ".svg" else "image/png"


def draw(given: ShownPlot | Drawing, taken: set[str]) -> DrawnFigure | None:
    """Draw a figure. Return None if no run has a value for it.

    Args:
        taken: names of files that other figures have. That of the figure is added.
    """
    if isinstance(given, Drawing):
        content = given.picture.content
        if isinstance(content, bytes):
            return DrawnFigure(given.title, unique_name(given.name, ".png", taken), content)
        name = unique_name(given.name, ".svg", taken)
        return DrawnFigure(given.title, name, svg(timeline_figure(content)))
    try:
        shown = given.shown
        figure = plot_figure(shown)
    except TableError:
        return None
    if figure is None:
        return None
    name = unique_name(f"{given.study.name}-{given.plot.name}", ".svg", taken)
    return DrawnFigure(shown.title, name, svg(figure))
