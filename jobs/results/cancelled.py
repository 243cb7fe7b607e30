"""Lists of runs of a submission that must not start.

Each `cancel --where` writes a file of its own, so that calls at the same time lose no entries.
Workers read the files before each run. The local queue stops jobs of which all runs are listed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

from pydantic import TypeAdapter

from jobs.results.unreadable import BadLine, UnreadableResults, names_in, read_json
from jobs.whole_files import write_json

CANCELLED = "cancelled"  # folder of the lists inside the folder of a submission
_LIST = TypeAdapter(set[tuple[str, int]])


def read_cancelled(submission: Path, bad: list[BadLine] | None = None) -> set[tuple[str, int]]:
    """Return the tasks of a submission that were cancelled before they started."""
    folder = submission / CANCELLED
    try:
        names = names_in(folder)
    except UnreadableResults as error:
        if bad is not None:
            bad.append(BadLine(folder, 0, str(error)))
        return set()
    # Others are the temporary files of lists that are being written.
    lists = [folder / name for name in names if name.endswith(".json")]
    return {task for path in lists for task in read_json(path, _LIST, bad) or ()}


def add_cancelled(submission: Path, tasks: Iterable[tuple[str, int]]) -> None:
    name = f"{time.time_ns()}-{os.uname().nodename}-{os.getpid()}.json"
    write_json(submission / CANCELLED / name, sorted(tasks))
