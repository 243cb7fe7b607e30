"""Finds the results folders in ./logs, and the folder of the last accepted submission.

A submission is accepted when its runs start on this machine, when Slurm accepts a job array of it,
or when it has nothing to run. It then writes its folder to the file ./logs/.latest.json.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from jobs.code.state import DIFFS
from jobs.errors import CommandError
from jobs.results.manifest import ARTIFACTS, SNAPSHOTS, SUBMISSIONS, Manifest, read_manifests
from jobs.results.record import RECORDS
from jobs.results.unreadable import BadLine, UnreadableResults, names_in
from jobs.whole_files import write_json

LOGS = Path("logs")
# The variable is internal. The tests set it, so that they do not change the file of the user.
LATEST = LOGS / os.environ.get("JOBS_LATEST_NAME", ".latest.json")
REPLAY = LOGS / "replay"  # results of `jobs replay`, which are not a study of the user
# Folders that never contain results folders. They can have thousands of entries.
NOT_SEARCHED = (RECORDS, SUBMISSIONS, ARTIFACTS, SNAPSHOTS, DIFFS)


def note_accepted(folder: Path) -> None:
    """Note that a submission to a results folder was accepted, or that all its runs are done."""
    if folder != REPLAY.resolve():
        with suppress(OSError):
            LOGS.mkdir(exist_ok=True)
            write_json(LATEST, {"folder": str(folder)})


def latest_folder() -> Path | None:
    """Return the results folder that the last accepted submission noted, if it can be read."""
    try:
        return Path(json.loads(LATEST.read_text(encoding="utf-8"))["folder"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def folders_in(parent: Path, bad: list[BadLine] | None = None) -> list[Path]:
    """Return the results folders in a folder and its folders, as logs/flash and logs/h200/flash.

    Raises UnreadableResults if `parent` cannot be read.
    """

    def names(folder: Path) -> list[str]:
        try:
            return names_in(folder)
        except UnreadableResults as error:
            if bad is not None and os.path.isdir(folder):
                bad.append(BadLine(folder, 0, str(error)))
            return []

    found: list[Path] = []
    for folder in [parent / name for name in names_in(parent)]:
        inside = names(folder)
        if SUBMISSIONS in inside:
            found.append(folder)
        deeper = [folder / name for name in inside if name not in NOT_SEARCHED]
        found += [path for path in deeper if SUBMISSIONS in names(path)]
    return found


def results_folders(places: Iterable[Path], bad: list[BadLine]) -> list[Path]:
    """Return the results folders among some folders and in them. ./logs/replay must be named.

    Appends what cannot be read to `bad`. Raises CommandError if a place, other than ./logs, is no
    folder, or has no results.
    """
    found: dict[Path, Path] = {}
    for place in places:
        if place != LOGS and not place.is_dir():
            what = f"{place} is a file" if place.is_file() else f"there is no folder {place}"
            raise CommandError(f"{what}; give a results folder, or one that contains some")
        named = os.path.lexists(place / SUBMISSIONS)
        inside = {path.resolve(): path for path in ([place] if named else folders_in(place, bad))}
        if not named:
            inside.pop(REPLAY.resolve(), None)
        if not inside and place != LOGS:
            raise CommandError(
                f"{place} is not a results folder and contains none (a results folder has a "
                "subfolder submissions)"
            )
        found |= inside
    return list(found.values())


def manifests_of(folders: Iterable[Path]) -> dict[Path, list[Manifest]]:
    """Return the manifests of each results folder. Folders that cannot be read are left out."""
    found: dict[Path, list[Manifest]] = {}
    for folder in folders:
        with suppress(UnreadableResults):
            found[folder] = read_manifests(folder)
    return found
