"""Writes and reads `cancelled.json`, which lists runs of a submission that must not start.

`jobs cancel --where` writes the file to the folder of a submission. Workers read it before each
run and skip the listed runs. The local queue also stops the jobs of which all runs are listed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from jobs.json_files import write_json

CANCELLED = "cancelled.json"


def read_cancelled(submission: Path) -> set[tuple[str, int]]:
    """Return the (run id, repeat) pairs of a submission that were cancelled before they started.

    Args:
        submission: folder of the submission.
    """
    try:
        listed = json.loads((submission / CANCELLED).read_text(encoding="utf-8"))
        return {(run, repeat) for run, repeat in listed}
    except (OSError, ValueError, TypeError):
        return set()


def add_cancelled(submission: Path, tasks: Iterable[tuple[str, int]]) -> None:
    """Add (run id, repeat) pairs to the list of a submission."""
    write_json(submission / CANCELLED, sorted(read_cancelled(submission) | set(tasks)))
