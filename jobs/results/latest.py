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
from jobs.results.manifest import SUBMISSIONS, manifests_in
from jobs.results.unreadable import BadLine

LOGS = Path("logs")
LATEST = LOGS / ".latest.json"
REPLAY = LOGS / "replay"  # results of `jobs replay`, which are not a study of the user


def note_accepted(folder: Path) -> None:
    """Write to ./logs/.latest.json that a submission to a results folder was accepted.

    A submission of which all runs are done is accepted, too. Errors are ignored.
    """
    if folder != REPLAY.resolve():
        with suppress(OSError):
            write_json(LATEST, {"folder": str(folder)})


def latest_folder(bad: list[BadLine] | None = None) -> Path | None:
    """Return the results folder of the last accepted submission, or None if there is none.

    Args:
        bad: list to which a `BadLine` is added for each file or folder in ./logs that was searched
            and cannot be read.

    Raises:
        UnreadableResults: if ./logs cannot be read.
    """
    try:
        folder = Path(json.loads(LATEST.read_text(encoding="utf-8"))["folder"])
        if (folder / SUBMISSIONS).exists():
            return folder
    except (OSError, ValueError, TypeError, KeyError):
        pass
    manifests, unreadable = manifests_in(LOGS)
    if bad is not None:
        bad += unreadable
    accepted = [
        (manifest.created_at, folder)
        for folder in manifests
        if folder != REPLAY
        for manifest in manifests[folder]
        if manifest.handles
    ]
    return max(accepted)[1] if accepted else None


def results_folders() -> list[Path]:
    """Return the results folders in ./logs that contain a submission, sorted."""
    return sorted({path.parents[2] for path in LOGS.glob(f"*/{SUBMISSIONS}/*/manifest.json")})
