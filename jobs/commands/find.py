"""Find the results folder and the run that a command is about."""

from __future__ import annotations

from pathlib import Path

from jobs.results.manifest import SUBMISSIONS, BrokenManifest, read_manifests
from jobs.results.run_states import Observation, TaskState, observe
from jobs.status import Status
from jobs.submit import fail


def observed(folder: Path | None) -> Observation:
    try:
        return observe((folder or latest_folder()).resolve())
    except (FileNotFoundError, BrokenManifest) as error:
        fail(str(error))


def folders() -> list[Path]:
    return sorted(
        {path.parents[2] for path in Path("logs").glob(f"*/{SUBMISSIONS}/*/manifest.json")}
    )


def latest_folder() -> Path:
    try:
        newest = [(read_manifests(folder)[-1].created_at, folder) for folder in folders()]
    except BrokenManifest as error:
        fail(str(error))
    if not newest:
        fail("no results folder given, and none found in ./logs; pass the folder as an argument")
    return max(newest)[1]


def find_run(run: str, folder: Path | None) -> tuple[Observation, TaskState]:
    found = []
    for path in [folder] if folder else folders():
        seen = observed(path)
        matches = [task for task in seen.tasks if task.run.id.startswith(run)]
        found += [(seen, task) for task in matches]
    ids = sorted({task.run.id for _, task in found})
    if not ids:
        fail(
            f"no run whose id begins with {run!r} in {folder or './logs'}; "
            "'python -m jobs status --json' lists the ids of all runs"
        )
    if len(ids) > 1:
        fail(
            f"{run!r} is ambiguous: {len(ids)} run ids begin with it, such as {', '.join(ids[:5])}"
        )

    def freshness(item: tuple[Observation, TaskState]) -> tuple[bool, float]:
        record = item[1].record
        bad = record is not None and record.status not in (Status.ok, Status.unsupported)
        return bad, record.finished_at if record else 0.0  # prefer a repeat that failed

    return max(found, key=freshness)
