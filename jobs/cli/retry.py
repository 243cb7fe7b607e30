"""The command `retry`: submit failed and missing runs again."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated

from jobs.block import TaskKey
from jobs.cli.arguments import Folder, Where, flag
from jobs.cli.observed import observed
from jobs.cli.output import fail, note
from jobs.cli.preview import preview
from jobs.cli.submission import locked, plan, start
from jobs.cli.where import matching
from jobs.errors import InputError
from jobs.formatting import counted, tally
from jobs.launch.plan_submission import Options
from jobs.launch.submission import reload
from jobs.results.manifest import Manifest
from jobs.status import Status
from systems.terminal import INTERRUPTED

EXAMPLES = "logs/flash --where 'status == oom'"


def retry(
    folder: Folder = None,
    where: Where = None,
    dry_run: Annotated[
        bool, flag("--dry-run", "Print what would be submitted, as submit does, and exit.")
    ] = False,
) -> None:
    """Submit the failed and missing runs of a results folder again.

    Runs that ran out of memory (oom) count as failed. Each submission of the folder is repeated
    with its own sweep and executor (Slurm, local or debug), the newest first. Exit codes: see
    submit.
    """
    seen = observed(folder)  # the plan shows the bad lines
    wanted = {
        task.key: task.status
        for task in matching(seen, where).tasks
        if task.status.is_failure or task.status.runs_again_on_retry
    }
    if not wanted:
        which = "" if where is None else " and satisfies the condition"
        print(f"nothing to retry in {seen.folder}: no run failed, is missing or is oom{which}")
        note(*seen.bad_lines)
        return
    code = 0
    for manifest in reversed(seen.manifests):  # newest first
        mine = {task: state for task, state in wanted.items() if task[0] in manifest.runs}
        if not mine or not manifest.is_own:  # a sweep of another user could name any command
            continue
        wanted = {task: state for task, state in wanted.items() if task not in mine}
        options = Options(
            manifest.executor,
            seen.folder,
            retry_failed=True,
            snapshot=manifest.snapshot is not None,
            only=frozenset(mine),
        )
        try:
            code = max(code, _retry(manifest, mine, options, dry_run))
        except InputError as error:  # older submissions may still be valid
            note(f"submission {manifest.id} is not repeated: {error}")
            code = 2
        if code == INTERRUPTED:
            raise SystemExit(code)
    if wanted:
        fail(
            f"{counted(len(wanted), 'run')} of other users not retried; submit a sweep of your own"
        )
    raise SystemExit(code)


def _retry(
    manifest: Manifest, wanted: dict[TaskKey, Status], options: Options, dry_run: bool
) -> int:
    """Repeat some runs of one submission, or only print what would be submitted.

    Return the exit code.
    """
    if manifest.checkouts:
        note(f"submission {manifest.id} with --against is not repeated; repeat: {manifest.command}")
        return 2
    loaded = reload(manifest)
    with nullcontext() if dry_run else locked(options) as lock:
        prepared = plan(loaded, options, manifest.sweep_path)
        tasks = [task for job in prepared.manifest.jobs for task in job.tasks]
        states = tally(wanted.get(task, "new") for task in tasks)
        what = f"{counted(len(tasks), 'run')} of {options.out}" + (f" ({states})" if states else "")
        print(f"retrying {what}, from submission {manifest.id} ({manifest.executor})", flush=True)
        if gone := len({run for run, _ in wanted} - prepared.manifest.runs.keys()):
            which = (
                f"{counted(gone, 'run')} {'is' if gone == 1 else 'are'} not in the sweep any more"
            )
            note(f"{which}, as after a new version of a benchmark; submit the sweep again")
        if lock is None:
            preview(prepared, f"settings of submission {manifest.id}", False)
            return 0
        return start(prepared, lock) if tasks else 0
