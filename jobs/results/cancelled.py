"""Writes and reads the lists of runs of a submission that must not start.

Each `jobs cancel --where` writes a file to the folder `cancelled` of a submission, so that calls at
the same time lose no entries. Workers read the files before each run and skip the listed runs. The
local queue also stops the jobs of which all runs are listed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from jobs.json_files import write_json
from jobs.results.unreadable import UnreadableResults, names_in

CANCELLED = "cancelled"  # folder of the lists inside the folder of a submission
OLD_CANCELLED = "cancelled.json"  # the only list in submissions of earlier versions


def read_cancelled(submission: Path) -> set[tuple[str, int]]:
    """Return the (run id, repeat) pairs of a submission that were cancelled before they started.

    Files that cannot be read are ignored.

    Args:
        submission: folder of the submission.
    """
    tasks: set[tuple[str, int]] = set()
    for path in _lists(submission):
        with suppress(OSError, ValueError, TypeError):
            listed = json.loads(path.read_text(encoding="utf-8"))
            tasks |= {(run, repeat) for run, repeat in listed}
    return tasks


def _lists(submission: Path) -> Iterator[Path]:
    yield submission / OLD_CANCELLED
    with suppress(UnreadableResults):
        for name in names_in(submission / CANCELLED):
            if name.endswith(".json"):  # not the temporary file of a list that is being written
                yield submission / CANCELLED / name


def add_cancelled(submission: Path, tasks: Iterable[tuple[str, int]]) -> None:
    """Add (run id, repeat) pairs to those of a submission that must not start.

    Raises:
        OSError: if the list cannot be written.
    """
    name = f"{time.time_ns()}-{os.uname().nodename}-{os.getpid()}.json"
    write_json(submission / CANCELLED / name, sorted(tasks))
