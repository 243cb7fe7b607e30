"""Finds stock sweeps: the sweep files in sweeps/, which are installed with the project."""

from __future__ import annotations

from pathlib import Path

from jobs import ROOT
from jobs.errors import InputError, Position, Problem, nearest


def stock_sweeps() -> list[Path]:
    """Return the paths of the stock sweeps, such as sweeps/flash.yaml, relative to `ROOT`."""
    return [file.relative_to(ROOT) for file in ROOT.glob("sweeps/**/*.yaml")]


def sweep_file(path: Path) -> Path:
    """Return `path` if it exists, or else the path of the stock sweep with this name.

    Raises InputError, which suggests stock sweeps, if there is neither.
    """
    try:
        path.stat()
    except FileNotFoundError as error:
        stock = stock_sweeps()
        if path in stock:
            return ROOT / path
        folder = path.parent if path.parent in {file.parent for file in stock} else Path("sweeps")
        alike = [file.as_posix() for file in stock if file.parent == folder]
        what = f"cannot be read: {error.strerror}, and no stock sweep has this name"
        hint = nearest((folder / path.stem).as_posix() + ".yaml", alike)
        if (own := path.with_suffix(".yaml")).is_file():
            hint = f"; did you mean {str(own)!r}?"
        raise InputError([Problem(Position(str(path)), what + hint)]) from None
    except (OSError, ValueError):  # reading the file reports this error
        pass
    return path
