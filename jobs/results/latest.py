"""Finds the results folder of the last accepted submission.

A submission is accepted when its local queue starts, or when Slurm accepts at least one of its job
arrays. It then writes its folder to the file ./logs/.latest.json. Without this file, the manifests
in ./logs are searched.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from jobs.json_files import write_json
from jobs.results.manifest import SUBMISSIONS, BrokenManifest, Manifest, read_manifest

LOGS = Path("logs")
LATEST = LOGS / ".latest.json"
REPLAY = LOGS / "replay"  # results of `jobs replay`, which are not a study of the user


def note_accepted(manifest: Manifest) -> None:
    """Write to ./logs/.latest.json that a submission was accepted. Errors are ignored."""
    if manifest.folder == REPLAY.resolve():
        return
    entry = {"folder": str(manifest.folder), "id": manifest.id, "time": manifest.created_at}
    with suppress(OSError):
        write_json(LATEST, entry)


def latest_folder() -> Path | None:
    """Return the results folder of the last accepted submission, or None if there is none."""
    try:
        entry = json.loads(LATEST.read_text(encoding="utf-8"))
        folder = Path(entry["folder"])
        if (folder / SUBMISSIONS / entry["id"] / "manifest.json").exists():
            return folder
    except (OSError, ValueError, TypeError, KeyError):
        pass
    return max(_accepted(), default=(0.0, None), key=lambda item: item[0])[1]


def _accepted() -> list[tuple[float, Path | None]]:
    """Return the time and the results folder of each accepted submission in ./logs."""
    found: list[tuple[float, Path | None]] = []
    for folder in results_folders():
        for path in (folder / SUBMISSIONS).glob("*/handles.json") if folder != REPLAY else ():
            with suppress(BrokenManifest):
                manifest = read_manifest(path.parent)
                if manifest.handles:
                    found.append((manifest.created_at, folder))
    return found


def results_folders() -> list[Path]:
    """Return the results folders in ./logs that contain a submission, sorted."""
    return sorted({path.parents[2] for path in LOGS.glob(f"*/{SUBMISSIONS}/*/manifest.json")})
