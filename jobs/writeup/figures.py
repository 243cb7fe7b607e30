"""The figures of the document: the plots of sweeps, and pictures that runs have drawn."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from jobs.errors import TableError
from jobs.report.plots import plot_figure
from jobs.report.timelines import timeline_figure
from jobs.report.views import Shown, select
from jobs.sweep.views import Plot
from jobs.writeup.drawings import Drawing
from jobs.writeup.studies import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
class Image:
    """A drawn figure."""

    title: str
    name: str  # of its file: SVG, or PNG if a run has kept no data of its picture
    content: bytes

    @property
    def media_type(self) -> str:
        return "image/svg+xml" if PurePath(self.name).suffix == ".svg" else "image/png"


def draw(given: ShownPlot | Drawing) -> Image | None:
    """Draw a figure. Return None if no run has a value for it."""
    if isinstance(given, Drawing):
        picture = given.picture
        if picture.data is None:
            return Image(given.title, _file_name(given.name, ".png"), picture.path.read_bytes())
        drawn = _svg(timeline_figure(picture.data))
        return Image(given.title, _file_name(given.name, ".svg"), drawn)
    try:
        shown = given.shown
        figure = plot_figure(shown)
    except TableError:
        return None
    if figure is None:
        return None
    name = _file_name(f"{given.study.name}-{given.plot.name}", ".svg")
    return Image(shown.title, name, _svg(figure))


def _file_name(text: str, suffix: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).lstrip(".") + suffix


def _svg(figure: Figure) -> bytes:
    """Return a figure as SVG, whose texts are texts. The same figure gives the same bytes."""
    import matplotlib

    file = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "figure"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()
