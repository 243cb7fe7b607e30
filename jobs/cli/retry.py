"""The command `retry`: submit failed and missing runs again."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from jobs.block import TaskKey
from jobs.cli.arguments import Folder
from jobs.cli.consoles import console, fail
from jobs.cli.find import note_bad_lines, observed
from jobs.cli.submit import plan_and_start, show_notes
from jobs.cli.where import Where, matching
from jobs.errors import CommandError, InputError
from jobs.formatting import counted
from jobs.launch.packing import worst_case_gpu_hours
from jobs.launch.plan_submission import Options, Prepared, prepare
from jobs.launch.submission import reload
from jobs.results.manifest import Manifest
from jobs.results.run_states import Observation
from jobs.run import varying
from jobs.status import Status
from jobs.sweep.benchmarks import NoBenchmark

EXAMPLES = "logs/flash --where 'status == oom'"

SHOWN_RUNS = 30
INTERRUPTED = 130  # exit code after Ctrl-C


def retry(
    folder: Folder = None,
    where: Where = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the runs and exit without submitting them."),
    ] = False,
) -> None:
    """Submit the failed and missing runs of a results folder again.

    Submits all failed, missing and out-of-memory (oom) runs of the folder again. If they come from
    several submissions, each of these is repeated with its own sweep and executor (Slurm, local or
    debug), the newest first. Runs that are ok, unsupported, queued or running are not submitted.
    With --where, only runs that satisfy the condition are considered.

    The exit codes are those of python -m jobs.submit.
    """
    seen = observed(folder, shows_bad_lines=True)  # the plan shows them
    wanted = _to_retry(matching(seen, where))
    if not wanted:
        which = "" if where is None else " and satisfies the condition"
        text = f"nothing to retry in {seen.folder}: no run failed, is missing or is oom{which}"
        console.print(text, soft_wrap=True, highlight=False)
        note_bad_lines(seen.bad_lines)
        return
    known = {(task.run.id, task.repeat) for task in seen.tasks}
    code = 0
    for manifest in reversed(seen.manifests):  # newest first
        mine = {task: state for task, state in wanted.items() if task[0] in manifest.runs}
        if mine and not manifest.is_own:  # its sweep could name any command
            continue
        if mine:
            wanted = {task: state for task, state in wanted.items() if task not in mine}
            options = Options(
                manifest.executor,
                seen.folder,
                retry_failed=True,
                snapshot=manifest.snapshot is not None,
                save_untracked=manifest.save_untracked,
                # Without a condition, runs that a new version of a benchmark added are submitted.
                only=None if where is None else frozenset(mine),
                leave_out=frozenset(known - mine.keys()),
            )
            code = max(code, _retry(seen, manifest, mine, options, dry_run))
        if code == INTERRUPTED:
            break
    if wanted and code != INTERRUPTED:
        fail(
            f"{counted(len(wanted), 'run')} of other users not retried; submit a sweep of your own"
        )
    raise SystemExit(code)


def _retry(
    seen: Observation,
    manifest: Manifest,
    wanted: dict[TaskKey, Status],
    options: Options,
    dry_run: bool,
) -> int:
    """Repeat some runs of one submission, and return the exit code.

    With `dry_run`, only print the runs.
    """
    if manifest.checkouts:
        which = f"submission {manifest.id} of {seen.folder}"
        fail(f"retry cannot repeat runs of --against ({which}); repeat: {manifest.command}")
    try:
        loaded = reload(manifest)
        if dry_run:
            prepared = prepare(loaded, options, manifest.sweep_path)
            show_notes(prepared)
            _announce(seen, prepared, manifest, wanted)
            _show_plan(prepared)
            return 0
        return plan_and_start(
            loaded,
            options,
            manifest.sweep_path,
            lambda prepared: _announce(seen, prepared, manifest, wanted),
        )
    except (InputError, NoBenchmark, CommandError) as error:  # the code has changed since then
        fail(str(error))


def _show_plan(prepared: Prepared) -> None:
    """Print the jobs, the GPU-hours and the runs of a submission that is not started."""
    manifest = prepared.manifest
    hours = worst_case_gpu_hours(manifest.jobs)
    what = f"{counted(len(manifest.jobs), 'job')}, at most {hours:.1f} GPU-hours"
    console.print(f"  {what}", highlight=False)
    tasks = [task for job in manifest.jobs for task in job.tasks]
    names = varying(prepared.expansion.runs)
    for run, repeat in tasks[:SHOWN_RUNS]:
        which = f" repeat={repeat}" if manifest.sweep.repeats > 1 else ""
        text = f"  {run}  {manifest.runs[run].label(names)}{which}"
        console.print(text, highlight=False, soft_wrap=True)
    if len(tasks) > SHOWN_RUNS:
        console.print(f"  … and {len(tasks) - SHOWN_RUNS} more")


def _to_retry(seen: Observation) -> dict[TaskKey, Status]:
    """Return the runs that `retry` submits if their submission contains them, with their states."""
    return {
        task.key: task.status
        for task in seen.tasks
        if task.status.is_failure or task.status.runs_again_on_retry
    }


def _announce(
    seen: Observation, prepared: Prepared, last: Manifest, wanted: dict[TaskKey, Status]
) -> None:
    """Print which runs are retried.

    `last` is the submission whose runs are repeated.
    """
    tasks = [task for job in prepared.manifest.jobs for task in job.tasks]
    states = Counter(str(wanted.get(task, "new")) for task in tasks)
    kinds = ", ".join(f"{count} {state}" for state, count in states.most_common())
    text = (
        f"retrying {counted(len(tasks), 'run')} of {seen.folder}"
        f"{f' ({kinds})' if kinds else ''}, from submission {last.id} ({last.executor})"
    )
    console.print(text, soft_wrap=True, highlight=False)
