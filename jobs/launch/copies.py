"""Copies of code in a results folder, and the folders from which jobs import what is in a copy."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from jobs import ROOT
from jobs.code.export import hash_of
from jobs.errors import CommandError
from jobs.launch.protection import make_own


def store(copy: Path, final: Path, ends: str | tuple[str, ...] = "") -> None:
    """Move a copy of code to its place in a results folder, unless it is there already.

    Raises CommandError if files of the earlier copy whose names have these `ends` have changed,
    OSError if it cannot be stored or belongs to another user.
    """
    if not final.is_dir():
        partial = final.with_name(f".{final.name}-{os.urandom(4).hex()}")
        final.parent.mkdir(parents=True, exist_ok=True)
        try:
            shutil.move(copy, partial)
            partial.rename(final)
        except OSError:
            if not final.is_dir():  # else another process was faster
                raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    make_own(final)
    if copy.exists() and hash_of(final, copy, ends) != hash_of(copy, ends=ends):
        raise CommandError(
            f"files in {final} were modified after they were copied; remove this folder when no "
            "job uses it"
        )


def import_paths(copies: Mapping[Path, Path]) -> tuple[Path | None, list[str], list[str]]:
    """Return where jobs run and import the code that this process would import, in copies.

    These are the copy of the current folder, which need not exist, or None if it is in no
    repository; folders in copies for PYTHONPATH; and folders for PYTHONPATH that are in no copy.
    `copies` has the folder of the copy of each repository, by the root of the repository. One that
    is inside another comes first.
    """

    def copied(folder: Path) -> Path | None:
        folder = folder.resolve()
        found = (r for r in copies if folder.is_relative_to(r))
        return next((copies[root] / folder.relative_to(root) for root in found), None)

    given = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    inside: dict[str, None] = {}
    others: dict[str, None] = {}
    for entry in [*given, *sys.path, *_editable_folders()]:
        target = copied(Path(entry or os.curdir))
        if target is not None and target.is_dir():
            inside[str(target)] = None
        elif entry in given:
            others[os.path.abspath(entry)] = None
    return copied(Path.cwd()), list(inside), list(others)


def _editable_folders() -> list[str]:
    """Return the folders of packages that setuptools installed as editable through a finder."""
    finders = [m for name, m in list(sys.modules.items()) if name.startswith("__editable__")]
    paths = [path for finder in finders for path in getattr(finder, "MAPPING", {}).values()]
    return [str(Path(path).parent) for path in paths]
