"""Finds stock sweeps: the sweep files in sweeps/, which are installed with the project."""

from __future__ import annotations

from pathlib import Path

from jobs import ROOT
from jobs.errors import InputError, Position, Problem, nearest


def stock_sweeps() -> list[Path]:
    """Return the paths of the stock sweeps, such as sweeps/flash.yaml, relative to `ROOT`."""
    return [file.relative_to(ROOT) for file in ROOT.glob("sweeps/**/*.yaml")]


def sweep_file(path: Path, beside: Path = Path()) -> Path:
    """Return `path` in the folder `beside`, or if it is not there, the stock sweep with this name.

    Raises InputError, which suggests stock sweeps, if there is neither.
    """
    own = beside / path
    try:
        own.stat()
    except FileNotFoundError as error:
        stock = stock_sweeps()
        if path in stock:
            return ROOT / path
        folder = path.parent if path.parent in {file.parent for file in stock} else Path("sweeps")
        alike = [file.as_posix() for file in stock if file.parent == folder]
        what = f"cannot be read: {error.strerror}, and no stock sweep has this name"
        hint = nearest((folder / path.stem).as_posix() + ".yaml", alike)
        if own.with_suffix(".yaml").is_file():
            hint = f"; did you mean {str(path.with_suffix('.yaml'))!r}?"
        raise InputError([Problem(Position(str(own)), what + hint)]) from None
    except (OSError, ValueError):  # reading the file reports this error
        pass
    return own
