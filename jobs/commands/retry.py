"""The command `python -m jobs retry`: submit failed and missing runs again."""

from __future__ import annotations

from collections import Counter
from typing import Annotated

import typer

from jobs.command_line.plain_console import plain_console
from jobs.commands.arguments import Folder
from jobs.commands.find import observed
from jobs.commands.where import Where, matching
from jobs.errors import InputError
from jobs.formatting import counted
from jobs.launch.packing import worst_case_gpu_hours
from jobs.launch.snapshot import SnapshotError
from jobs.launch.submission import Options, Prepared, prepare, reload
from jobs.results.manifest import Manifest
from jobs.results.run_states import Observation, TaskKey
from jobs.run import varying
from jobs.status import Status
from jobs.submit import fail, plan_and_start
from jobs.sweep.benchmarks import NoBenchmark

SHOWN_RUNS = 30
console = plain_console()


def retry(
    folder: Folder = None,
    where: Where = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print the runs and exit without submitting them."),
    ] = False,
) -> None:
    """Submit the failed and missing runs of a results folder again.

    Finds the newest submission that contains a failed, missing or out-of-memory (oom) run. Submits
    all such runs of this submission again, to the same executor (Slurm, local or debug). Runs that
    are ok, unsupported, queued or running are not submitted. With --where, only runs that satisfy
    the condition are considered.

    The exit codes are those of python -m jobs.submit.
    """
    seen = observed(folder)
    wanted = _to_retry(matching(seen, where))
    last = next((m for m in reversed(seen.manifests) if _contains(m, wanted)), None)
    if last is None:
        which = "" if where is None else " and satisfies the condition"
        text = f"nothing to retry in {seen.folder}: no run failed, is missing or is oom{which}"
        console.print(text, soft_wrap=True, highlight=False)
        return
    options = Options(
        last.executor,
        seen.folder,
        retry_failed=True,
        snapshot=last.snapshot is not None,
        save_untracked=last.save_untracked,
        # Without a condition, runs that a new version of the benchmark added are submitted, too.
        only=None if where is None else frozenset(wanted),
    )
    try:
        if dry_run:
            prepared = prepare(reload(last), options, last.sweep_path)
            _announce(seen, prepared, last, wanted)
            if prepared.manifest.jobs:
                _show_plan(prepared)
            return
        code = plan_and_start(
            reload(last),
            options,
            last.sweep_path,
            lambda prepared: _announce(seen, prepared, last, wanted),
        )
    except (InputError, NoBenchmark, SnapshotError) as error:  # the code has changed since then
        fail(str(error))
    raise SystemExit(code)


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


def _contains(manifest: Manifest, tasks: dict[TaskKey, Status]) -> bool:
    return any(run in manifest.runs for run, _ in tasks)


def _announce(
    seen: Observation, prepared: Prepared, last: Manifest, wanted: dict[TaskKey, Status]
) -> None:
    """Print which runs are retried, and which runs are left because they are in other submissions.

    Args:
        seen: states of all runs in the folder.
        prepared: the submission that repeats the runs.
        last: the submission whose runs are repeated.
        wanted: all runs of the folder that could be retried.
    """
    tasks = [task for job in prepared.manifest.jobs for task in job.tasks]
    states = Counter(str(wanted.get(task, "new")) for task in tasks)
    kinds = ", ".join(f"{count} {state}" for state, count in states.most_common())
    text = (
        f"retrying {counted(len(tasks), 'run')} of {seen.folder}"
        f"{f' ({kinds})' if kinds else ''}, from submission {last.id} ({last.executor})"
    )
    console.print(text, soft_wrap=True, highlight=False)
    left = [run for run, _ in wanted if run not in last.runs]
    if left:
        text = f"note: {counted(len(left), 'run')} of earlier submissions not retried; use --where"
        console.print(text, soft_wrap=True, highlight=False)
