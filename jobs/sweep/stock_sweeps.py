"""The stock sweeps: sweeps/*.yaml and sweeps/cpu/*.yaml, installed beside the packages."""

from __future__ import annotations

from pathlib import Path

from jobs import ROOT
from jobs.errors import InputError, Position, Problem, nearest


def sweep_file(path: Path) -> Path:
    """Return the file of a sweep: the one at this path, else the stock sweep of this name.

    Raises:
        InputError: there is neither; naming the stock sweeps.
    """
    try:
        path.stat()
    except FileNotFoundError as error:
        stock = [file.relative_to(ROOT) for file in ROOT.glob("sweeps/**/*.yaml")]
        if path in stock:
            return ROOT / path
        folder = path.parent if path.parent in {file.parent for file in stock} else Path("sweeps")
        alike = [file.as_posix() for file in stock if file.parent == folder]
        what = f"cannot be read: {error.strerror}, nor is it a stock sweep"
        hint = nearest(path.as_posix(), alike)
        raise InputError([Problem(Position(str(path)), what + hint)]) from None
    except (OSError, ValueError):  # whoever reads it says why it cannot be read
        pass
    return path
