"""Collects the images of a report: the plots of the sweep, and the pictures of its runs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jobs.code.short_names import short_names
from jobs.formatting import format_scalar
from jobs.frame.metrics import metrics_of
from jobs.frame.results import Result, with_artifacts
from jobs.report.plots import draw_plot
from jobs.report.run_pictures import pictures_of
from jobs.report.views import select
from jobs.results.run_states import Observation
from jobs.run import varying
from jobs.sweep.views import Plot

_LONGEST = 200  # maximum length of a file name without suffix; file systems allow 255 bytes


@dataclass(frozen=True)
class Image:
    path: Path
    title: str


def draw_plots(
    observation: Observation, plots: Iterable[Plot], folder: Path, results: list[Result]
) -> list[Image]:
    """Draw plots as PNG files in a folder. Plots without any measured value are skipped."""
    drawn = []
    for plot in plots:
        shown = select(observation, plot, results)
        path = draw_plot(shown, folder)
        if path is not None:
            (metric,) = metrics_of(plot)
            drawn.append(Image(path, metric.heading(shown.title)))
    return drawn


def save_run_pictures(
    observation: Observation, results: list[Result], folder: Path, taken: Iterable[str]
) -> tuple[list[Image], list[str]]:
    """Write the pictures of runs to a folder as PNG files. Return them, and what was left out.

    The file name of a picture contains the parameters, the repeat and the device if they differ
    between the runs with pictures. The folder is created if needed. `taken` names are reserved for
    other images in it.
    """
    found, left_out = [], []
    for result, record in with_artifacts(results, observation.records):
        pictures, problems = pictures_of(record, observation.folder)
        found += [(result, picture) for picture in pictures]
        left_out += problems
    names = set(taken)
    saved = []
    with_images = [result for result, _ in found]
    references = {reference for result in with_images for reference in result.run.code}
    values = [value for result in with_images for value in result.run.params.values()]
    short = short_names(references, values)
    for result, picture in found:
        labels = _distinguishing_labels(result, with_images)
        labels = {what: short.get(value, value) for what, value in labels.items()}
        stem = "-".join([picture.name, *labels.values()])
        name = unique_name(stem, ".png", names)
        folder.mkdir(parents=True, exist_ok=True)
        picture.save(folder / name)
        title = ", ".join([picture.name, *(f"{what} {value}" for what, value in labels.items())])
        saved.append(Image(folder / name, title))
    return saved, left_out


def _distinguishing_labels(result: Result, results: list[Result]) -> dict[str, str]:
    """Return the labels in which a result differs from other results of its benchmark.

    A label is a parameter, the repeat or the device. Labels that are the same for all results of
    the benchmark are omitted.
    """
    others = [other for other in results if other.run.benchmark == result.run.benchmark]
    swept = varying([other.run for other in others])
    labels = {name: format_scalar(result.run.params.get(name)) for name in swept}
    if len({other.repeat for other in others}) > 1:
        labels["repeat"] = str(result.repeat)
    if len({other.device for other in others}) > 1:
        labels["device"] = result.device
    return labels


def file_stem(text: str) -> str:
    """Return a text as a file name without suffix."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).lstrip(".")[:_LONGEST]


def unique_name(text: str, suffix: str, taken: set[str]) -> str:
    """Return a file name for a text that is not taken, and add it to those that are.

    If the name is taken, a number is appended to it.
    """
    stem = file_stem(text)
    name, number = f"{stem}{suffix}", 1
    while name in taken:
        number += 1
        name = f"{stem}-{number}{suffix}"
    taken.add(name)
    return name
