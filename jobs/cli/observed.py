"""Find and read what a command is about, and print to stderr what in it cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from jobs.cli.output import fail, note
from jobs.errors import CommandError
from jobs.formatting import relative
from jobs.printing import waiting_for
from jobs.results.latest import (
    LOGS,
    REPLAY,
    folders_in,
    latest_folder,
    manifests_of,
    results_folders,
)
from jobs.results.run_states import Observation, TaskState, observe
from jobs.results.unreadable import BadLine
from jobs.status import Status
from jobs.sweep.run_sources import RunSources


def observed(folder: Path | None, tell: bool = False) -> Observation:
    """Return the state of a results folder. Default: that of the last accepted submission.

    `tell` names this folder in a note, for commands whose output does not.
    """
    path = folder or latest_folder()
    if path is None:
        fail(
            "no results folder given, and no submission was made here; pass a folder; "
            "`python -m jobs list` lists results"
        )
    path = path.resolve()
    if tell and folder is None:
        note(f"results in {relative(path)}")
    with waiting_for(f"the results in {path} to be read"):
        return observe(path)


def observed_in(places: list[Path]) -> Iterator[Observation]:
    """Yield the state of each results folder among some folders and in them.

    What cannot be read is printed at the end.
    """
    bad: list[BadLine] = []
    sources = RunSources()
    for folder in results_folders(places, bad):
        try:
            seen = observe(folder.resolve(), sources)
        except CommandError as error:
            bad.append(BadLine(folder, 0, str(error)))
        else:
            bad += seen.bad_lines
            yield seen
    note(*bad)


def found_run(run: str, folder: Path | None) -> tuple[Observation, TaskState]:
    """Return the run whose id begins with `run`, and the state of its results folder.

    Without a folder, it is that of the last accepted submission if it has the run, otherwise all
    folders in ./logs. Of several repeats, one that failed is preferred, then one that was executed,
    then the last.
    """
    if not run:
        fail("RUN must be the first characters of a run id, got ''")
    found: list[tuple[Observation, TaskState]] = []
    with waiting_for("the results of the run to be read"):
        for path in [folder] if folder else _folders_with(run):
            seen = observe(path.resolve())
            found += [(seen, task) for task in seen.tasks if task.run.id.startswith(run)]
    ids = sorted({task.run.id for _, task in found})
    if not ids:
        fail(
            f"no run whose id begins with {run!r} in {folder or f'./{LOGS}'}; name another folder "
            "with --in FOLDER; 'python -m jobs status FOLDER --json' lists the ids of all runs"
        )
    if len(ids) > 1:
        fail(
            f"{run!r} is ambiguous: {len(ids)} run ids begin with it, such as {', '.join(ids[:5])}"
        )
    seen, task = max(found, key=lambda item: _preference(item[1]))
    note(*seen.bad_lines)
    return seen, task


def _folders_with(run: str) -> list[Path]:
    """Return the results folders whose records are read to find a run. ./logs/replay is last."""
    latest = latest_folder()
    folders = [path.resolve() for path in ([latest] if latest else []) + folders_in(LOGS)]
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
    return [path for path in holding if path != REPLAY.resolve()] or holding


def _preference(task: TaskState) -> tuple[bool, bool, float]:
    """Return a sort key of the repeats of a run. The last one is shown."""
    record = task.record
    bad = record is not None and record.status not in (Status.ok, Status.unsupported)
    # Rounds after the one that failed are recorded as failed, too, but not executed.
    executed = bad and record is not None and record.log is not None
    return bad, executed, record.finished_at if record else 0.0
