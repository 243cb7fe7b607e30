"""Spells the commands of this project as the user can type them in the current folder.

Commands print other commands to run next. A printed command begins as the command of the user does:

    sweeps status                         the console command `sweeps` was run
    python -m jobs status                 `python` on PATH runs this interpreter
    .venv/bin/python -m jobs status       another interpreter, as the user typed it
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
    """Return how to call a command of this project, as a list of words. See `command`."""
    if os.path.basename(sys.argv[0]) == CONSOLE:
        found = shutil.which(CONSOLE)
        return [CONSOLE if _is_file(found, Path(sys.argv[0])) else sys.argv[0], name]
    if name == "submit":
        return [_interpreter(), "-m", "jobs.submit"]
    if name in REPORTS and _is_file("aggregate.py", ROOT / "aggregate.py"):
        return [_interpreter(), "aggregate.py", *([] if name == "tables" else [name])]
    return [_interpreter(), "-m", "jobs", name]


def _interpreter() -> str:
    """Return `python` if this runs the current interpreter, or else the name that the user typed.

    The name is not used if it does not run the current interpreter, for example because the current
    folder has changed. The result is then the absolute path of the interpreter.
    """
    for name in ("python", sys.orig_argv[0]):
        if _runs_this_interpreter(shutil.which(name)):
            return name
    return sys.executable


def _runs_this_interpreter(path: str | None) -> bool:
    """Return whether a program is the current interpreter in the same environment.

    The interpreter of a virtual environment is a link to the interpreter from which it was created.
    Therefore the folders are compared, too.
    """
    own = sys.executable
    return _is_file(path, Path(own)) and os.path.realpath(
        os.path.dirname(os.path.abspath(str(path)))
    ) == os.path.realpath(os.path.dirname(own))


def _is_file(path: str | Path | None, file: Path) -> bool:
    """Return whether two paths are the same existing file. None is no file."""
    try:
        return path is not None and os.path.samefile(path, file)
    except OSError:
        return False
