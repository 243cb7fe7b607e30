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
from collections.abc import Collection
from pathlib import Path

from jobs import ROOT
from systems.external.reference import find_module

CONSOLE = "sweeps"  # name of the console command; pyproject.toml defines it
REPORTS = ("tables", "attempts", "compare", "export", "report")  # commands of aggregate.py
JOBS = (
    "status", "logs", "cancel", "retry", "replay", "sources", "hours", "carry", "check",
)  # fmt: skip


def command(name: str) -> str:
    """Return how to call a command of this project, quoted for a shell.

    Args:
        name: name of the command: submit, tables, compare, or a command of `python -m jobs`.
    """
    return shlex.join(words(name))


def words(name: str) -> list[str]:
    """Return how to call a command of this project, as a list of words. See `command`."""
    if os.path.basename(sys.argv[0]) == CONSOLE:
        return [_console(), name]
    return [_interpreter(), *_module(name)]


def of_another_module(name: str, own: Collection[str]) -> str | None:
    """Return an error message if a command belongs to another module of this project, else None.

    Args:
        name: what the user typed instead of a command.
        own: the commands of the module that the user called.
    """
    if name in own or name not in ("submit", *REPORTS, *JOBS):
        return None
    module = "jobs.submit" if name == "submit" else "aggregate.py" if name in REPORTS else "jobs"
    return f"{name} belongs to {module}: {command(name)}"


def spelled_for_console(text: str) -> str:
    """Return a help text in which the commands are those of `sweeps`, for `sweeps --help`."""
    for old, new in (
        ("python -m jobs.submit", f"{CONSOLE} submit"),
        ("python -m jobs ", f"{CONSOLE} "),
        ("python aggregate.py attempts", f"{CONSOLE} attempts"),
        ("python aggregate.py compare", f"{CONSOLE} compare"),
        ("python aggregate.py export", f"{CONSOLE} export"),
        ("python aggregate.py", f"{CONSOLE} tables"),
    ):
        text = text.replace(old, new)
    return text


def _module(name: str) -> list[str]:
    """Return the arguments of the interpreter that run a command of this project."""
    if name == "submit":
        return ["-m", "jobs.submit"]
    if name not in REPORTS:
        return ["-m", "jobs", name]
    only = [] if name == "tables" else [name]
    if _is_file("aggregate.py", ROOT / "aggregate.py"):
        return ["aggregate.py", *only]
    if _is_file(find_module("aggregate"), ROOT / "aggregate.py"):
        return ["-m", "aggregate", *only]
    # The current folder contains another module with this name, which `-m aggregate` would run.
    return ["-m", "jobs.console", name]


def _console() -> str:
    """Return `sweeps`, or the path of this script if PATH has no or another `sweeps`."""
    found = shutil.which(CONSOLE)
    return CONSOLE if _is_file(found, Path(sys.argv[0])) else sys.argv[0]


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
