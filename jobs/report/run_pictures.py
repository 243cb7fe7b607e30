"""Pictures of runs: timelines, drawn from the data that a run has kept, and PNG files."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jobs.report.timelines import timeline_figure
from systems.plot_data import SUFFIX, Spans, Stack, read_figure


@dataclass(frozen=True)
class RunPicture:
    """A picture among the artifacts of a run."""

    name: str  # of its file, without suffix
    path: Path
    data: Stack | Spans | None  # None: the file is a PNG file

    def save(self, path: Path) -> None:
        """Write the picture as a PNG file."""
        if self.data is None:
            shutil.copyfile(self.path, path)
        else:
            timeline_figure(self.data, self.data.title).savefig(path, dpi=110)


def pictures_in(folder: Path) -> list[RunPicture]:
    """Return the pictures in the folder of a run, by name.

    Of a picture with data, a PNG file is used only if the data are of another version or damaged.
    """
    found = {path.stem: RunPicture(path.stem, path, None) for path in folder.glob("*.png")}
    for path in folder.glob(f"*{SUFFIX}"):
        name = path.name.removesuffix(SUFFIX)
        with suppress(ValueError):
            found[name] = RunPicture(name, path, _read(path))
    return [found[name] for name in sorted(found)]


def _read(path: Path) -> Stack | Spans:
    data = read_figure(path)
    if isinstance(data, Stack) and any(len(each) != len(data.x) for each in data.layers.values()):
        raise ValueError(f"{path}: each layer must have one value per x")
    return data
