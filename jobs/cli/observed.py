"""Read what a command is about, and print to stderr what in it cannot be read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from jobs.cli.output import fail, note
from jobs.errors import CommandError
from jobs.printing import waiting_for
from jobs.results import find
from jobs.results.latest import LOGS, folders_in
from jobs.results.manifest import SUBMISSIONS
from jobs.results.run_states import Observation, TaskState, observe
from jobs.results.unreadable import BadLine


def observed(folder: Path | None, shows_bad_lines: bool = False) -> Observation:
    """Return the state of a results folder. Default: that of the last accepted submission.

    `shows_bad_lines` tells that the caller shows the bad lines of the observation itself.
    """
    path = (folder or find.last_folder()).resolve()
    with waiting_for(f"the results in {path} to be read"):
        seen = observe(path)
    note_bad_lines([] if shows_bad_lines else seen.bad_lines)
    return seen


def observed_in(places: list[Path]) -> Iterator[Observation]:
    """Yield the state of each results folder among some folders and in them.

    What cannot be read is printed at the end.
    """
    bad: list[BadLine] = []
    for folder in results_folders_in(places, bad):
        try:
            seen = observe(folder.resolve())
        except CommandError as error:
            bad.append(BadLine(folder, 0, str(error)))
        else:
            bad += seen.bad_lines
            yield seen
    note_bad_lines(bad)


def results_folders_in(places: list[Path], bad: list[BadLine]) -> list[Path]:
    """Return the results folders among some folders and in them, and append what is unreadable."""
    found: dict[Path, Path] = {}
    for place in places:
        if place != LOGS and not os.path.isdir(place):
            what = f"{place} is a file" if os.path.isfile(place) else f"there is no folder {place}"
            fail(f"{what}; give a results folder, or one that contains some")
        inside = [place] if os.path.isdir(place / SUBMISSIONS) else folders_in(place, bad)
        found |= {path.resolve(): path for path in inside}
    return list(found.values())


def found_run(run: str, folder: Path | None) -> tuple[Observation, TaskState]:
    """Return a run and the state of its results folder. See `find.find_run`."""
    with waiting_for("the results of the run to be read"):
        seen, task = find.find_run(run, folder)
    note_bad_lines(seen.bad_lines)
    return seen, task


def note_bad_lines(bad_lines: Iterable[BadLine]) -> None:
    """Print what cannot be read."""
    for line in bad_lines:
        note(line)
