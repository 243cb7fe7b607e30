"""The command `python -m jobs retry`: submit failed and missing runs again."""

from __future__ import annotations

from rich.console import Console

from jobs.commands.arguments import Folder
from jobs.commands.find import observed
from jobs.errors import InputError
from jobs.launch.snapshot import SnapshotError
from jobs.launch.submission import Options, prepare, reload
from jobs.submit import fail, start_and_report
from jobs.sweep.benchmarks import NoBenchmark

console = Console(markup=False, emoji=False)


def retry(folder: Folder = None) -> None:
    """Submit the failed and missing runs of a results folder again.

    Finds the newest submission that contains a failed or missing run. Submits all failed, missing
    and out-of-memory (oom) runs of this submission again, to the same executor (Slurm, local or
    debug). Runs that are ok, unsupported, queued or running are not submitted.

    The exit codes are those of python -m jobs.submit.
    """
    seen = observed(folder)
    bad = {task.run.id for task in seen.tasks if task.status.is_failure}
    last = next((m for m in reversed(seen.manifests) if bad & m.runs.keys()), seen.manifests[-1])
    options = Options(
        last.executor,
        seen.folder,
        retry_failed=True,
        snapshot=last.snapshot is not None,
        save_untracked=last.save_untracked,
    )
    try:
        prepared = prepare(reload(last), options, last.sweep_path)
    except (InputError, NoBenchmark, SnapshotError) as error:  # the code has changed since then
        fail(str(error))
    if not prepared.manifest.jobs:
        console.print("nothing to retry: no run failed or is missing")
        return
    raise SystemExit(start_and_report(prepared, options))
