"""Which line of this project a call came from, told from a stack of Python frames."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]  # unresolved, as frames name their files
PROJECT = ROOT / "systems"  # what is measured lives here; its launcher does not


@dataclass(frozen=True)
class Frame:
    """One call of a stack."""

    filename: str
    line: int
    name: str


@dataclass(frozen=True)
class Source:
    """Where something was done.

    source: file, line and function, `systems/model.py:42 forward`.
    code: the text of that line, which outlives its number.
    called_at: the line of the project that called it; a Linear has one line, its callers tell apart
        which.
    """

    source: str
    code: str
    called_at: str


def source_of(frames: Iterable[Frame], root: Path = ROOT) -> Source:
    """The first frame inside the project, else the innermost of all; frames start innermost."""
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
    """The stack of whoever called the function that asks, innermost first."""
    frames = []
    frame = sys._getframe(2)
    while frame is not None:
        frames.append(Frame(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        frame = frame.f_back  # type: ignore[assignment]
    return frames


def _place(frame: Frame, root: Path) -> str:
    """File and line: of the project from its root, of others by the last two names."""
    path = Path(frame.filename)
    inside = path.is_relative_to(root / PROJECT.name)
    shown = path.relative_to(root) if inside else Path(*path.parts[-2:])
    return f"{shown}:{frame.line}"
