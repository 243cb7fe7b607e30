"""Spells the commands of this project as the user can type them in the current folder.

A command that is printed begins as that of the user: `sweeps status`, `python -m jobs status`, or
`.venv/bin/python -m jobs status` if `python` on PATH is another interpreter.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path

from jobs import ROOT

CONSOLE = "sweeps"  # name of the console command; pyproject.toml defines it
REPORTS = ("tables", "attempts", "compare", "export", "report")  # documented with aggregate.py


def command(name: str) -> str:
    """Return how to call a command of this project, quoted for a shell."""
    return shlex.join(words(name))


def words(name: str) -> list[str]:
    """Return how to call a command of this project, as a list of words."""
    if os.path.basename(sys.argv[0]) == CONSOLE:
        found = shutil.which(CONSOLE)
        return [CONSOLE if _is_file(found, Path(sys.argv[0])) else sys.argv[0], name]
    if name == "submit":
        return [_interpreter(), "-m", "jobs.submit"]
    if name in REPORTS and _is_file("aggregate.py", ROOT / "aggregate.py"):
        return [_interpreter(), "aggregate.py", *([] if name == "tables" else [name])]
    return [_interpreter(), "-m", "jobs", name]


def _interpreter() -> str:
    """Return `python`, else the name that the user typed, else the path of the interpreter.

    The interpreter of a virtual environment is a link to the one from which it was created, so the
    folders are compared, too.
    """
    own = Path(sys.executable)
    for name in ("python", sys.orig_argv[0]):
        path = shutil.which(name)
        if path and _is_file(path, own) and _is_file(os.path.dirname(path) or ".", own.parent):
            return name
    return sys.executable


def _is_file(path: str | Path | None, file: Path) -> bool:
    """Return whether two paths are the same existing file or folder."""
    try:
        return path is not None and os.path.samefile(path, file)
    except OSError:
        return False
