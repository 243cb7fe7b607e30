"""The pictures of a results folder: the sweep's plots, and what runs left behind as PNG."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jobs.formatting import format_scalar
from jobs.report.entries import Entry
from jobs.report.plots import draw
from jobs.report.values import values_of
from jobs.run import varying
from jobs.status import Observation
from jobs.sweep.schema import Plot

_LONGEST = 200  # bytes of a file's name, of the 255 that file systems take


@dataclass(frozen=True)
class Picture:
    path: Path
    title: str


def draw_plots(
    observation: Observation, plots: Iterable[Plot], folder: Path, chosen: list[Entry]
) -> list[Picture]:
    """Draw the plots for which anything was measured."""
    drawn = []
    for plot in plots:
        path = draw(observation, plot, folder, chosen)
        if path is not None:
            (value,) = values_of(plot)
            drawn.append(Picture(path, f"{plot.title or plot.name}: {value.header}"))
    return drawn


def copy_pictures(
    observation: Observation, chosen: list[Entry], folder: Path, taken: Iterable[str]
) -> list[Picture]:
    """Copy every PNG that a run left, under a name that says of which run it is.

    Args:
        taken: names of files that are in the folder for another reason.
    """
    found = [
        (entry, path)
        for entry in chosen
        if entry.record is not None and entry.record.artifacts is not None
        for path in sorted((observation.folder / entry.record.artifacts).glob("*.png"))
    ]
    names = set(taken)
    copied = []
    for entry, path in found:
        told = _told_apart(entry, [other for other, _ in found])
        stem = "-".join([path.stem, *told.values()])
        name = _unique(re.sub(r"[^A-Za-z0-9._-]+", "_", stem)[:_LONGEST], names)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / name)
        title = ", ".join([path.stem, *(f"{what} {value}" for what, value in told.items())])
        copied.append(Picture(folder / name, title))
    return copied


def _told_apart(entry: Entry, entries: list[Entry]) -> dict[str, str]:
    """What tells an entry's pictures from those of the benchmark's other entries."""
    others = [other for other in entries if other.run.benchmark == entry.run.benchmark]
    swept = varying([other.run for other in others])
    told = {name: format_scalar(entry.run.params.get(name)) for name in swept}
    if len({other.repeat for other in others}) > 1:
        told["repeat"] = str(entry.repeat)
    if len({other.device for other in others}) > 1:
        told["device"] = entry.device
    return told


def _unique(stem: str, names: set[str]) -> str:
    """A file name that is not among the names yet; it is added to them."""
    name, number = f"{stem}.png", 1
    while name in names:
        number += 1
        name = f"{stem}-{number}.png"
    names.add(name)
    return name
