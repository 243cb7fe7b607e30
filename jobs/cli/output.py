"""Prints what commands say: lines, which are broken on a terminal only, notes and errors."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable
from typing import NoReturn

from jobs.formatting import UNLIMITED, wrapped
from jobs.printing import say


def width() -> int:
    """Return the width of the output in columns. The variable COLUMNS sets that of a terminal."""
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    return shutil.get_terminal_size().columns if on_terminal else UNLIMITED


def broken(line: str, indent: int = 0) -> str:
    """Return a line for stdout, broken at the width of a terminal, with its end.

    All lines but the first are indented by `indent` spaces.
    """
    return wrapped(line, width(), " " * indent) + "\n"


def columns(rows: Iterable[tuple[str, ...]], start: str = "") -> str:
    """Return rows of texts below each other. The last text of a row is broken at the width."""
    rows = list(rows)
    sizes = [max(map(len, texts)) for texts in zip(*rows, strict=True)]
    lines = ""
    for row in rows:
        cells = [text.ljust(size) for text, size in zip(row, sizes, strict=True)]
        begin = start + "".join(f"{cell}  " for cell in cells[:-1])
        lines += broken((begin + row[-1]).rstrip(), len(begin))
    return lines


def note(*texts: object) -> None:
    """Print notes to stderr."""
    for text in texts:
        say(f"note: {text}", sys.stderr)


def fail(message: str) -> NoReturn:
    """Print an error message to stderr and exit with code 2."""
    red = sys.stderr is not None and sys.stderr.isatty()
    say(f"\x1b[31m{message}\x1b[0m" if red else message, sys.stderr)
    raise SystemExit(2)
