"""Figures of results: the plots of a sweep, and the pictures of its runs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

from jobs.frame.results import Result
from jobs.report.plots import ImageFormat, image, plot_figure
from jobs.report.timelines import timeline_figure
from jobs.report.views import Shown, select
from jobs.results.run_states import Observation
from jobs.sweep.views import Plot
from systems.plot_data import Spans, Stack

_LONGEST = 200  # maximum length of a file name without suffix; file systems allow 255 bytes


@dataclass(frozen=True)
class Figure:
    """A figure that is not drawn yet."""

    title: str
    name: str  # of its file, without suffix
    content: Shown | Stack | Spans | bytes  # a plot, a timeline, or a PNG file that a run has left

    @classmethod
    def of_plot(cls, observation: Observation, plot: Plot, results: list[Result]) -> Self:
        """Return the figure of a plot.

        Raises:
            TableError: if the plot names an unknown parameter or has an invalid condition.
        """
        shown = select(observation, plot, results)
        return cls(shown.title, plot.name, shown)

    def draw(self, taken: set[str], form: ImageFormat = "svg") -> Drawing | None:
        """Draw the figure. None: no run has a value for it. Only PNG has the title in the figure.

        Args:
            taken: names of files that other figures have. That of the figure is added.

        Raises:
            TableError: if a prediction fails.
        """
        title = self.title if form == "png" else ""
        if isinstance(self.content, bytes):
            return Drawing(self.title, _unique(self.name, ".png", taken), self.content)
        if isinstance(self.content, Shown):
            figure = plot_figure(self.content, title)
        else:
            figure = timeline_figure(self.content, title)
        if figure is None:
            return None
        return Drawing(self.title, _unique(self.name, f".{form}", taken), image(figure, form))


@dataclass(frozen=True)
class Drawing:
    """A figure as the content of a file."""

    title: str
    name: str  # of its file
    content: bytes


def file_stem(text: str) -> str:
    """Return a text as a file name without suffix."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).lstrip(".")[:_LONGEST]


def _unique(text: str, suffix: str, taken: set[str]) -> str:
    """Return a file name for a text that is not taken, if need be with a number at its end."""
    stem = file_stem(text)
    name, number = f"{stem}{suffix}", 1
    while name in taken:
        number += 1
        name = f"{stem}-{number}{suffix}"
    taken.add(name)
    return name
