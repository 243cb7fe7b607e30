"""Protects the code and the list of jobs of a submission in a results folder of several users.

Whoever can write to a folder can rename what is in it, and put something else in its place. So the
folders of a submission are writable by their owner only, whatever the umask. The results folder
and its folders `submissions` and `snapshots` get the sticky bit if others can write to them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jobs.results.manifest import SNAPSHOTS, SUBMISSIONS


@contextmanager
def protected(results: Path, copies_code: bool) -> Iterator[None]:
    """Let only this user write to the files that the `with` block creates in a results folder."""
    for name in (".", SUBMISSIONS, SNAPSHOTS)[: 2 + copies_code]:
        folder = results / name
        folder.mkdir(parents=True, exist_ok=True)
        if _others_can_write(folder) and folder.stat().st_uid == os.getuid():
            with suppress(OSError):  # e.g. a file system without modes
                folder.chmod(stat.S_IMODE(folder.stat().st_mode) | stat.S_ISVTX)
    before = os.umask(0)
    os.umask(before | stat.S_IWGRP | stat.S_IWOTH)
    try:
        yield
    finally:
        os.umask(before)


def make_own(copy: Path) -> None:
    """Let only this user write to a copy of code, and to the bytecode that Python saves in it.

    Raises PermissionError if the copy belongs to another user.
    """
    for folder in {path.parent for path in copy.rglob("*.py")}:
        (folder / "__pycache__").mkdir(0o755, exist_ok=True)  # else a job creates it
    for path in (copy, *copy.rglob("*")):
        if not path.is_symlink():
            path.chmod(stat.S_IMODE(path.stat().st_mode) & ~(stat.S_IWGRP | stat.S_IWOTH))


def weakness(results: Path) -> str | None:
    """Return how others can replace copies of code in a results folder, or None if they cannot.

    The folders around the results folder are not checked: they may hold the user's own code, too.
    """
    for folder in filter(os.path.isdir, (results, results / SNAPSHOTS)):
        owner = folder.stat().st_uid
        if owner not in (0, os.getuid()):
            return f"{folder} belongs to user {owner}"
        if owner != os.getuid() and _others_can_write(folder):
            return f"others can write to {folder}"
    return None


def _others_can_write(folder: Path) -> bool:
    """Return whether others can rename the files of this user in a folder."""
    mode = folder.stat().st_mode
    return not mode & stat.S_ISVTX and bool(mode & (stat.S_IWGRP | stat.S_IWOTH))
