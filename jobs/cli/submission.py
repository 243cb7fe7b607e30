"""Plan a submission, start it and report what became of it, for `submit` and `retry`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from jobs.cli.output import fail, note
from jobs.errors import CommandError
from jobs.formatting import compact_ids, counted, relative, tally
from jobs.launch.lock import SubmitLock
from jobs.launch.plan_submission import Options, Prepared, failed_records, prepare
from jobs.printing import say
from jobs.results import unwritable
from jobs.results.counting import is_thrown_away
from jobs.results.manifest import Executor, Manifest
from jobs.results.record import Record
from jobs.results.run_states import not_needed
from jobs.sweep.load import LoadedSweep
from systems.terminal import outliving_output


def plan(loaded: LoadedSweep, options: Options, sweep_path: str) -> Prepared:
    """Plan a submission, and print the notes about the plan."""
    prepared = prepare(loaded, options, sweep_path)
    note(*prepared.notes)
    return prepared


@contextmanager
def locked(options: Options) -> Iterator[SubmitLock]:
    """Lock the results folder while a submission is planned and its jobs are submitted.

    So another submission at the same time does not submit the same runs.
    """
    try:
        with SubmitLock(options.out.resolve(), options.force) as lock:
            yield lock
    except OSError as error:
        if error.errno in unwritable.FULL:
            raise CommandError(unwritable.message(options.out, error.errno)) from None
        where = error.filename or options.out
        raise CommandError(f"{where}: {error.strerror or error}") from None


def start(prepared: Prepared, lock: SubmitLock) -> int:
    """Start a planned submission, and print a summary and the commands that show its results.

    Returns the exit code of the command, see `submit`.
    """
    manifest = prepared.manifest
    _show_skipped(prepared)
    if not manifest.jobs and prepared.unknown:
        fail("nothing to submit, but the state of some runs is unknown (see above)")
    try:
        records = [r for r in _execute(prepared, lock) if not is_thrown_away(r)]
    except KeyboardInterrupt:
        _report_interrupt(manifest)
        return 130
    if not manifest.jobs:
        here = relative(manifest.folder)
        print(f"nothing to submit; results are in {here}. --force executes all runs again")
    reports = ("compare", "tables") if manifest.blocks else ("tables",)
    if manifest.executor is not Executor.slurm:
        return _report_here(prepared, records, reports)
    if not manifest.jobs:
        _follow_up(manifest, "status", *reports)
        return 1 if prepared.failed_before else 0
    runs = counted(sum(len(job.tasks) for job in manifest.jobs), "run")
    where = f"as {counted(len(manifest.jobs), 'job')}; results go to"
    print(f"submitted {runs} {where} {relative(manifest.folder)}")
    print(f"Slurm jobs: {compact_ids(manifest.slurm_ids.values())}")
    _follow_up(manifest, "status", "cancel", *reports)
    return 0


def _execute(prepared: Prepared, lock: SubmitLock) -> list[Record]:
    """Start the jobs. Runs on this machine continue if the reader of the output exits."""
    from jobs.launch import submission  # imports much that a dry run does not need

    if prepared.manifest.executor is Executor.slurm:
        return submission.start(prepared, lock)
    folder = shlex.quote(str(relative(prepared.manifest.folder)))
    told = "note: the output cannot be written, the runs continue; to see their states, run:"
    with outliving_output(f"{told}\n  python -m jobs status {folder}"):
        return submission.start(prepared, lock)


def _show_skipped(prepared: Prepared) -> None:
    before = prepared.failed_before
    if prepared.options.only is None:
        if kept := len(prepared.done) - len(before):
            print(f"skipping {counted(kept, 'run')} with a result")
        if before:
            statuses = tally(record.status for record in before)
            what = f"{counted(len(before), 'run')} that failed before ({statuses})"
            say(f"skipping {what}; --retry-failed repeats failed runs", sys.stderr)
    if in_flight := len(prepared.in_flight) - prepared.unknown:
        print(f"skipping {counted(in_flight, 'run')} already queued or running")


def _report_here(prepared: Prepared, records: list[Record], reports: Sequence[str]) -> int:
    """Report what became of the runs of a local or debug submission. Return the exit code."""
    manifest = prepared.manifest
    failed = failed_records(records)
    if records:
        last = {(record.run, record.repeat): record for record in records}  # not of a trial
        statuses = tally(record.status for record in last.values())
        print(f"{statuses}; results are in {relative(manifest.folder)}")
    _follow_up(manifest, *reports)
    if failed:
        _follow_up(manifest, "status", f"logs {failed[0].run[:8]} --in")
    recorded = {(r.run, r.repeat) for r in records}
    if left_out := not_needed(manifest) - recorded:
        print(f"{counted(len(left_out), 'run')} not needed, because their blocks are decided")
    lost = sum(len(job.tasks) for job in manifest.jobs) - len(recorded | left_out)
    if lost > 0 and manifest.executor is Executor.local:
        say(f"{counted(lost, 'run')} without a record; to see why, run:", sys.stderr)
        _follow_up(manifest, "status")
        return 1
    return 1 if failed or prepared.failed_before else 0


def _report_interrupt(manifest: Manifest) -> None:
    where = relative(manifest.folder)
    if manifest.executor is not Executor.slurm:
        text = f"finished runs are recorded in {where}"
    elif manifest.slurm_ids:
        text = f"Slurm jobs {compact_ids(manifest.slurm_ids.values())} stay submitted"
    else:
        may = "Slurm may have accepted jobs, which status will show"
        text = may if manifest.slurm_jobs else "nothing was submitted"
    say(f"interrupted: {text}; repeat the command to continue", sys.stderr)
    if manifest.slurm_jobs:
        _follow_up(manifest, "status", "cancel")


def _follow_up(manifest: Manifest, *commands: str) -> None:
    """Print commands whose last argument is the results folder, each on one line for copying."""
    for command in commands:
        print(f"  python -m jobs {command} {shlex.quote(str(relative(manifest.folder)))}")
