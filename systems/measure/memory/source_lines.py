"""Find the innermost source line of this project in a Python stack."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]  # with symlinks, as in the file names of Python frames
PROJECT = ROOT / "systems"  # the measured code, without the launcher


@dataclass(frozen=True)
class Frame:
    """One frame of a Python stack."""

    filename: str
    line: int
    name: str


@dataclass(frozen=True)
class Source:
    """Source line in a Python stack, and the line from which its function was called.

    Attributes:
        source: file, line and function, for example `systems/model.py:42 forward`.
        code: text of the line. It identifies the line if line numbers change.
        called_at: file and line from which that function was called, directly or through other
            libraries. It distinguishes the calls of functions such as Linear.forward. "" if not
            known.
    """

    source: str
    code: str
    called_at: str


def source_of(frames: Iterable[Frame], root: Path = ROOT) -> Source:
    """Return the innermost source line of this project in a Python stack.

    Without any, all lines count as those of this project. `frames` has the innermost first.
    """
    stack = list(frames)
    if not stack:
        return Source("no Python frame", "", "")
    project = f"{root / PROJECT.name}/"
    inside = [frame for frame in stack if frame.filename.startswith(project)] or stack
    first, *outer = inside
    return Source(
        f"{_place(first, root)} {first.name}",
        linecache.getline(first.filename, first.line).strip(),
        _place(outer[0], root) if outer else "",
    )


def calling_frames() -> list[Frame]:
    """Return the frames that called the caller of this function, the innermost first."""
    frames = []
    frame = sys._getframe(2)
    while frame is not None:
        frames.append(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back  # type: ignore[assignment]
    return frames


def _place(frame: Frame, root: Path) -> str:
    """Return `file:line`, relative to the project; of another path the last two parts."""
    path = Path(frame.filename)
    inside = path.is_relative_to(root / PROJECT.name)
    shown = path.relative_to(root) if inside else Path(*path.parts[-2:])
    return f"{shown}:{frame.line}"
