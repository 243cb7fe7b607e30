"""Read what a command is about, and print to stderr what in it cannot be read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from jobs.cli.output import note
from jobs.printing import waiting_for
from jobs.results import find
from jobs.results.run_states import Observation, TaskState, observe
from jobs.results.unreadable import BadLine


def observed(folder: Path | None, shows_bad_lines: bool = False) -> Observation:
    """Return the state of a results folder.

    Args:
        folder: the results folder. None: the folder of the last accepted submission.
        shows_bad_lines: whether the caller shows the bad lines of the observation itself.
    """
    path = (folder or find.last_folder()).resolve()
    with waiting_for(f"the results in {path} to be read"):
        seen = observe(path)
    note_bad_lines([] if shows_bad_lines else seen.bad_lines)
    return seen


def found_run(
    run: str, folder: Path | None, prefer_live: bool = False
) -> tuple[Observation, TaskState]:
    """Return a run and the state of its results folder. See `find.find_run`."""
    with waiting_for("the results of the run to be read"):
        seen, task = find.find_run(run, folder, prefer_live)
    note_bad_lines(seen.bad_lines)
    return seen, task


def matching(seen: Observation, where: str | None) -> Observation:
    """Return the state of a results folder with only the runs that satisfy a condition."""
    if where is None:
        return seen
    from jobs.cli import where as condition  # imports what reads sweep files

    return condition.matching(seen, where)


def note_bad_lines(bad_lines: Iterable[BadLine]) -> None:
    """Print what cannot be read."""
    for line in bad_lines:
        note(line)
