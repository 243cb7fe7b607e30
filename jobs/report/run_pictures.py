"""Pictures of runs: timelines, drawn from the data that a run has kept, and PNG files."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from jobs.code.short_names import short_names
from jobs.errors import shown
from jobs.formatting import format_scalar, on_one_line
from jobs.frame.results import Result
from jobs.report.figures import Figure
from jobs.results.record import Record
from jobs.run import varying
from systems.plot_data import SUFFIX, Spans, Stack, read_figure

MAX_BYTES = 5_000_000  # of a file; a larger one is not drawn
MAX_VALUE = 1e15  # of the data of a timeline
_PNG = b"\x89PNG"  # first bytes of a PNG file


def run_pictures(
    results: Iterable[Result], folder_of: Callable[[Record], Path], name: str | None = None
) -> tuple[list[Figure], list[str]]:
    """Return the pictures of runs, and what is wrong with those that are left out.

    Of several executions of a run on a kind of device, the first with a picture counts. The title
    of a picture has the parameters in which the run differs from others, and the device if there
    are several.

    Args:
        folder_of: returns the results folder of a record.
        name: file name without suffix. None: all.
    """
    found: dict[tuple[str, str, str], tuple[Result, Stack | Spans | bytes]] = {}
    left_out = []
    for result in results:
        if result.record is None or result.artifacts is None:
            continue
        pictures, problems = pictures_of(folder_of(result.record), result.artifacts)
        left_out += [f"a picture is left out: {problem}" for problem in problems]
        for stem, content in pictures.items():
            if name in (None, stem):
                found.setdefault((result.run.id, result.device, stem), (result, content))
    runs = [result.run for result, _ in found.values()]
    values = (value for run in runs for value in run.params.values())
    short = short_names({reference for run in runs for reference in run.code}, values)
    several_devices = len({device for _, device, _ in found}) > 1
    figures = []
    for (_, device, stem), (result, content) in found.items():
        same = [run for run in runs if run.benchmark == result.run.benchmark]
        params = {each: result.run.params.get(each) for each in varying(same)}
        labels = {key: short.get(str(value), format_scalar(value)) for key, value in params.items()}
        labels |= {"device": device} if several_devices else {}
        what = stem.replace("_", " ") if isinstance(content, bytes) else content.title
        more = [text for each, value in labels.items() if (text := f"{each} {value}") not in what]
        title = f"{what} ({', '.join(more)})" if more else what
        figures.append(Figure(title, "-".join([stem, *labels.values()]), content))
    return figures, left_out


def pictures_of(
    folder: Path, artifacts_of: str
) -> tuple[dict[str, Stack | Spans | bytes], list[str]]:
    """Return the pictures of a run by name, and what is wrong with files that are left out.

    `artifacts_of` is its folder of artifacts, relative to the results folder.
    Of a picture with data, a PNG file is used only if the data are of another version or damaged.
    Files that are not in the results folder, or links, are left out.
    """
    artifacts = (folder / artifacts_of).resolve()
    if not artifacts.is_relative_to(folder.resolve()):
        return {}, [f"{artifacts} is not in the results folder"]
    pictures: dict[str, Stack | Spans | bytes] = {}
    problems: dict[str, str] = {}
    for suffix in (".png", SUFFIX):
        for path in sorted(artifacts.glob(f"*{suffix}")):
            name = path.name.removesuffix(suffix)
            try:
                pictures[name] = _read(path)
            except (OSError, ValueError) as error:
                problems[name] = f"{shown(str(path))}: {shown(on_one_line(str(error)))}"
    left_out = [text for name, text in problems.items() if name not in pictures]
    return dict(sorted(pictures.items())), left_out


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
