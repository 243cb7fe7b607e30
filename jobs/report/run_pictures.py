"""Pictures of runs: timelines, drawn from the data that a run has kept, and PNG files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jobs.errors import shown
from jobs.formatting import on_one_line
from jobs.report.timelines import timeline_figure
from jobs.results.record import Record
from systems.plot_data import SUFFIX, Spans, Stack, read_figure

MAX_BYTES = 5_000_000  # of a file; a larger one is not drawn
MAX_VALUE = 1e15  # of the data of a timeline
_PNG = b"\x89PNG"  # first bytes of a PNG file


@dataclass(frozen=True)
class RunPicture:
    """A picture among the artifacts of a run."""

    name: str  # of its file, without suffix
    content: Stack | Spans | bytes  # of a timeline, or of a PNG file

    def save(self, path: Path) -> None:
        """Write the picture as a PNG file."""
        if isinstance(self.content, bytes):
            path.write_bytes(self.content)
        else:
            timeline_figure(self.content, self.content.title).savefig(path, dpi=110)


def pictures_of(record: Record, folder: Path) -> tuple[list[RunPicture], list[str]]:
    """Return the pictures of a run by name, and what is wrong with files that are left out.

    Of a picture with data, a PNG file is used only if the data are of another version or damaged.
    Files that are not in the results folder, or links, are left out.
    """
    artifacts = (folder / str(record.artifacts)).resolve()
    if not artifacts.is_relative_to(folder.resolve()):
        return [], [f"{artifacts} is not in the results folder"]
    pictures: dict[str, RunPicture] = {}
    problems: dict[str, str] = {}
    for suffix in (".png", SUFFIX):
        for path in sorted(artifacts.glob(f"*{suffix}")):
            name = path.name.removesuffix(suffix)
            try:
                pictures[name] = RunPicture(name, _read(path))
            except (OSError, ValueError) as error:
                problems[name] = f"{shown(str(path))}: {shown(on_one_line(str(error)))}"
    left_out = [text for name, text in problems.items() if name not in pictures]
    return [pictures[name] for name in sorted(pictures)], left_out


def _read(path: Path) -> Stack | Spans | bytes:
    if path.is_symlink() or not path.is_file() or not path.name.isprintable():
        raise ValueError("not a regular file with a printable name")
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES:,} bytes")
    if path.suffix == ".png":
        content = path.read_bytes()
        if not content.startswith(_PNG):
            raise ValueError("not a PNG file")
        return content
    data = read_figure(path)
    if any(abs(value) > MAX_VALUE for value in _values(data)):
        raise ValueError(f"has a value larger than {MAX_VALUE:g}")
    return data


def _values(data: Stack | Spans) -> list[float]:
    if isinstance(data, Spans):
        spans = [span for row in data.rows.values() for found in row.values() for span in found]
        return [value for span in spans for value in span]
    phases = [value for phase in data.phases for value in (phase.start, phase.end)]
    return [*data.x, *phases, *(value for each in data.layers.values() for value in each)]
