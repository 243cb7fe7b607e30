"""Find the results folder and the run that a command is about."""

from __future__ import annotations

import os
from pathlib import Path

from jobs.errors import CommandError
from jobs.results.latest import LOGS, REPLAY, folders_in, latest_folder, manifests_of, noted_folder
from jobs.results.run_states import Observation, TaskState, observe
from jobs.results.unreadable import BadLine
from jobs.status import Status


def last_folder(bad: list[BadLine]) -> Path:
    """Return the results folder of the last accepted submission.

    Args:
        bad: list to which a `BadLine` is added for each file or folder elsewhere in ./logs that was
            searched and cannot be read.

    Raises:
        CommandError: if there is no such folder.
    """
    gone = noted_folder()
    if gone is not None and not os.path.exists(gone):
        raise CommandError(
            f"the last submission went to {gone}, which no longer exists; pass a folder"
        )
    found: list[BadLine] = []
    folder = latest_folder(found)
    bad += [line for line in found if folder is None or not line.path.is_relative_to(folder)]
    if folder is None:
        raise CommandError(
            f"no results folder given, and none in ./{LOGS} has an accepted submission; pass the "
            "folder as an argument"
        )
    return folder


def find_run(
    run: str, folder: Path | None, prefer_live: bool = False
) -> tuple[Observation, TaskState]:
    """Return the run whose id begins with `run`, and the state of its results folder.

    If the run has several repeats, returns a repeat that failed if there is one, preferably one
    that was executed and has a log. Otherwise returns the repeat that finished last.

    Args:
        folder: the results folder. None: the folder of the last accepted submission if it contains
            the run, otherwise all folders in ./logs.
        prefer_live: whether to prefer a repeat that is running or queued.

    Raises:
        CommandError: if there is no such run, or more than one, or a folder cannot be read.
    """
    found: list[tuple[Observation, TaskState]] = []
    for path in [folder] if folder else _folders_with(run):
        seen = observe(path.resolve())
        found += [(seen, task) for task in seen.tasks if task.run.id.startswith(run)]
    ids = sorted({task.run.id for _, task in found})
    if not ids:
        raise CommandError(
            f"no run whose id begins with {run!r} in {folder or f'./{LOGS}'}; name another folder "
            "with --in FOLDER; 'python -m jobs status FOLDER --json' lists the ids of all runs"
        )
    if len(ids) > 1:
        raise CommandError(
            f"{run!r} is ambiguous: {len(ids)} run ids begin with it, such as {', '.join(ids[:5])}"
        )
    return max(found, key=lambda item: _preference(item[1], prefer_live))


def _folders_with(run: str) -> list[Path]:
    """Return the results folders whose records are read to find a run.

    If one run id begins with `run`, this is the folder of the last accepted submission if it
    contains the run, otherwise all folders that contain the run. The folder ./logs/replay is
    returned only if no other folder contains the run.
    """
    latest, replay = latest_folder(), REPLAY.resolve()
    folders = [path.resolve() for path in (*([latest] if latest else []), *folders_in(LOGS))]
    # Manifests that cannot be read are left out. Reading the records, too, would take long.
    ids = {
        path: {one for manifest in manifests for one in manifest.runs if one.startswith(run)}
        for path, manifests in manifests_of(dict.fromkeys(folders)).items()
    }
    holding = [path for path in ids if ids[path]]
    if len(set().union(*ids.values())) > 1:
        return holding  # the run is ambiguous, unless some of the ids are of outdated versions
    if latest and latest.resolve() in holding:
        return [latest.resolve()]
    return [path for path in holding if path != replay] or holding


def _preference(task: TaskState, prefer_live: bool) -> tuple[int, bool, bool, float]:
    """Return a sort key of the repeats of a run. The last one is shown."""
    live = [Status.queued, Status.unknown, Status.running]
    record = task.record
    bad = record is not None and record.status not in (Status.ok, Status.unsupported)
    first = 1 + live.index(task.status) if prefer_live and task.status in live else 0
    # Rounds after the one that failed are recorded as failed, too, but not executed.
    executed = bad and record is not None and record.log is not None
    return first, bad, executed, record.finished_at if record else 0.0
