"""Command line for submitting a sweep: `python -m jobs.submit SWEEP [KEY=VALUE]...`."""

from __future__ import annotations

import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from jobs.cli.completion import results_folders, sweep_files
from jobs.cli.consoles import console, errors, fail
from jobs.cli.invocation import command
from jobs.cli.parsers import as_path
from jobs.cli.plan import show_plan
from jobs.errors import CommandError, InputError
from jobs.formatting import compact_ids, counted, relative
from jobs.launch.against import find
from jobs.launch.lock import SubmitLock
from jobs.launch.plan_submission import Options, Prepared, failed_records, prepare
from jobs.launch.submission import start
from jobs.results import unwritable
from jobs.results.cancelled import read_cancelled
from jobs.results.counting import is_thrown_away
from jobs.results.latest import LOGS
from jobs.results.manifest import Executor, Manifest
from jobs.results.record import Record
from jobs.results.run_states import not_needed
from jobs.slurm_client import SlurmSilent, configuration
from jobs.sweep.load import LoadedSweep, load_sweep
from jobs.user_files import invalid_path, unusable_results
from systems.terminal import outliving_output

CLUSTER_FILE = "cluster.yaml"


EXAMPLES = """
# Submit to Slurm
sweeps/flash.yaml
# Show what would be submitted, with the sbatch scripts
sweeps/flash.yaml --dry-run --sbatch
# Run on this machine, without Slurm
sweeps/quickstart.yaml --local
# Debug some of the runs in this process
sweeps/flash.yaml --debug --where 'seq_len == 128'
# Change a parameter and the results folder
sweeps/flash.yaml 'seq_len=[128,256]' --out logs/mine
"""


def submit(
    sweep: Annotated[
        Path,
        typer.Argument(
            help="Sweep file, for example sweeps/flash.yaml.",
            parser=as_path,
            autocompletion=sweep_files,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Overrides of the sweep file. KEY is a benchmark parameter (dtype=bf16; a list "
            "such as 'seq_len=[128,256]' runs every value), a key of the sweep file (repeats=3), "
            "or a nested key (slurm.partition=h100).",
        ),
    ] = None,
    cluster: Annotated[
        Executor | None,
        typer.Option(
            help="Where to run: 'slurm' submits the jobs to Slurm, 'local' runs them on this "
            "machine, and 'debug' runs them in the foreground. [default: slurm]"
        ),
    ] = None,
    local: Annotated[
        bool,
        typer.Option(
            "--local",
            help="Same as --cluster local: run the jobs on this machine. Several jobs run at the "
            "same time if there are several GPUs.",
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug",
            help="Same as --cluster debug: execute the runs one after another in the foreground "
            "and stop at the first failure. A run without torchrun executes in this process and "
            "has no timeout.",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print the runs, the jobs, the expected time and the GPU-hours, and exit without "
            "running, submitting or writing anything.",
        ),
    ] = False,
    sbatch: Annotated[
        bool,
        typer.Option(
            "--sbatch", help="With --dry-run, also print the sbatch script of each job array."
        ),
    ] = False,
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--where",
            "--filter",
            metavar="CONDITION",
            help="Keep only the runs whose parameters satisfy this condition, for example 'seq_len "
            "> 4096 and dtype in [bf16, fp16]'. Operators: ==, !=, <, <=, >, >=, in, not in, and, "
            "or, not. The name 'benchmark' stands for the benchmark of a run. [default: all runs]",
        ),
    ] = None,
    rounds: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="How often the runs of blocks are executed, as the key blocks.rounds. auto: until "
            "all cells are decided, at most blocks.max_rounds times. [default: that of the sweep]",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Results folder. Runs that already have a result in it are skipped. [default: "
            "logs/<sweep name>]",
            parser=as_path,
            autocompletion=results_folders,
        ),
    ] = None,
    retry_failed: Annotated[
        bool,
        typer.Option(
            "--retry-failed",
            help="Also repeat runs that ended with status oom, timeout, error or wrong. Without "
            "this option, only killed, preempted, cancelled and missing runs are repeated.",
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Execute all runs, even those that already have a result or are queued or running "
            "in the results folder.",
        ),
    ] = False,
    repeat_unknown: Annotated[
        bool,
        typer.Option(
            "--repeat-unknown",
            help="Submit also runs of which it is unknown whether they are queued or running, "
            "because Slurm does not answer for their jobs. They may then be executed twice.",
        ),
    ] = False,
    keep_stale: Annotated[
        bool,
        typer.Option(
            "--keep-stale",
            help="Skip also runs whose results are from older code. Without this option, they are "
            "measured again.",
        ),
    ] = False,
    parallel: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --local, the maximum number of jobs that run at the same time. [default: as "
            "many as the GPUs allow; a job without GPUs runs alone]",
        ),
    ] = None,
    snapshot: Annotated[
        bool,
        typer.Option(
            "--snapshot",
            help="Copy the files that git tracks, with their uncommitted changes, into the results "
            "folder, and run the jobs from the copy. You can then edit and commit while jobs wait. "
            "Copied are the repository of the current folder and this project's.",
        ),
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="REV|DIR",
            help="Measure each run also with another checkout of the code: a git revision such as "
            "HEAD, which is the code without uncommitted edits, or a folder. The two are measured "
            "in turn. To compare them, run: python aggregate.py compare FOLDER.",
        ),
    ] = None,
    save_untracked: Annotated[
        bool,
        typer.Option(
            "--save-untracked",
            help="Save also the contents of untracked files of at most 200 kB in the diffs of the "
            "results folder. Check first that none contains a secret. Without this option, only "
            "their names are saved.",
        ),
    ] = False,
    cluster_file: Annotated[
        Path | None,
        typer.Option(
            help="YAML file with the settings of your cluster: keys 'slurm' (partition, account, "
            "...) and 'resources'. The sweep file and KEY=VALUE take precedence over it. [default: "
            "$JOBS_CLUSTER, else ./cluster.yaml if it exists]",
            parser=as_path,
        ),
    ] = None,
) -> None:
    """Run a sweep: expand its file into runs, group them into jobs, and start the jobs.

    A run is skipped if it has already succeeded or failed in the results folder with the present
    code, or if it is queued or running. Repeat the same command to continue an interrupted sweep.
    Add --retry-failed to repeat failed runs.

    Exit code: 0 if the jobs were submitted to Slurm, or if every run ended as ok, oom or
    unsupported; 1 if a run failed, now or in an earlier submission; 2 if the input is invalid or
    the submission failed; 130 if interrupted.
    """
    if local + debug + (cluster is not None) > 1:
        fail("only one of --local, --debug and --cluster is allowed")
    executor = Executor.local if local else Executor.debug if debug else cluster or Executor.slurm
    if sbatch and not dry_run:
        fail("--sbatch requires --dry-run")
    if where and len(where) > 1:
        fail(f"--where is given {len(where)} times; join the conditions with 'and'")
    if parallel is not None and executor is not Executor.local:
        fail(f"--parallel requires --local, got --parallel {parallel} with executor {executor}")
    for option, given in (("--snapshot", snapshot), ("--against", against is not None)):
        if given and executor is Executor.debug:
            fail(f"{option} is not allowed together with --debug")
    if out is not None and (wrong := unusable_results(out)):
        fail(f"--out {wrong}")
    try:
        settings = _cluster_file(cluster_file)
        in_blocks = [] if rounds is None else [f"blocks.rounds={rounds}"]
        loaded = load_sweep(
            sweep, [*(overrides or []), *in_blocks], where[0] if where else None, settings
        )
        options = Options(
            executor,
            out or LOGS / loaded.sweep.name,
            retry_failed,
            force,
            parallel,
            snapshot,
            save_untracked,
            keep_stale,
            repeat_unknown=repeat_unknown,
            against=None if against is None else find(against),
        )
        if dry_run:
            prepared = prepare(loaded, options, str(sweep))
            show_notes(prepared)
            show_plan(prepared, executor, settings, sbatch)
            return
        code = plan_and_start(loaded, options, str(sweep))
    except (InputError, CommandError) as error:
        fail(str(error))
    raise SystemExit(code)


def plan_and_start(
    loaded: LoadedSweep,
    options: Options,
    sweep_path: str,
    announce: Callable[[Prepared], None] | None = None,
) -> int:
    """Plan and start a submission, and report the results.

    The results folder is locked until the jobs are submitted, so that another submission at the
    same time does not submit the same runs.

    Args:
        sweep_path: path of the sweep file, to be saved in the manifest.
        announce: function that is called with the plan. The submission is then not started if all
            runs are done, queued or running.

    Returns:
        The exit code of the command. Its values are listed in `submit`.
    """
    try:
        with SubmitLock(options.out.resolve(), options.force) as lock:
            prepared = prepare(loaded, options, sweep_path)
            show_notes(prepared)
            if prepared.unknown and _repeats_unknown(options):
                prepared = prepare(loaded, replace(options, repeat_unknown=True), sweep_path)
            if announce is not None:
                announce(prepared)
                if not prepared.manifest.jobs:
                    return 0
            return start_and_report(prepared, options, lock)
    except OSError as error:
        if error.errno in unwritable.FULL:
            fail(unwritable.message(options.out, error.errno))
        where = error.filename or (options.out if _cwd_exists() else "the current folder")
        fail(f"{where}: {error.strerror or error}")


def _repeats_unknown(options: Options) -> bool:
    """Ask whether runs that may be queued or running are submitted, if Slurm answers at all."""
    if sys.stdin is None or not sys.stdin.isatty():
        return False
    try:
        if options.executor is Executor.slurm:
            configuration()
        errors.print("submit the runs that may be queued or running again? [y/N] ", end="")
        answer = input()
    except (EOFError, SlurmSilent):
        return False
    return answer.strip().lower() in ("y", "yes")


def _cwd_exists() -> bool:
    try:
        return bool(os.getcwd())
    except FileNotFoundError:
        return False


def show_notes(prepared: Prepared) -> None:
    """Print the warnings about a sweep, and the notes about a planned submission."""
    for warning in prepared.expansion.warnings:
        errors.print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True)
    for note in prepared.notes:
        errors.print(f"note: {note}", highlight=False, soft_wrap=True)


def start_and_report(prepared: Prepared, options: Options, lock: SubmitLock) -> int:
    """Start a prepared submission, then print a summary and the commands that show its results.

    Returns:
        The exit code of the command. Its values are listed in `submit`.
    """
    manifest = prepared.manifest
    where = relative(manifest.folder)
    before = prepared.failed_before
    if len(prepared.done) > len(before) and not options.leave_out:
        kept = len(prepared.done) - len(before)
        console.print(f"skipping {counted(kept, 'run')} with a result")
    if before and not options.leave_out:
        kinds = ", ".join(
            f"{n} {status}" for status, n in Counter(r.status for r in before).items()
        )
        note = (
            f"skipping {counted(len(before), 'run')} that failed before ({kinds}); "
            "--retry-failed repeats failed runs"
        )
        errors.print(note, soft_wrap=True, highlight=False)
    in_flight = len(prepared.in_flight) - prepared.unknown
    if in_flight:
        count = counted(in_flight, "run")
        console.print(f"skipping {count} already queued or running")
    if not manifest.jobs and not prepared.in_flight and not prepared.done:
        fail("nothing to run: the sweep has no runs")
    if not manifest.jobs and prepared.unknown:
        fail("nothing to submit, but the state of some runs is unknown (see above)")
    try:
        records = [r for r in _start(prepared, options, lock) if not is_thrown_away(r)]
    except KeyboardInterrupt:
        _report_interrupt(manifest)
        return 130
    if not manifest.jobs:
        console.print(f"nothing to submit; results are in {where}", soft_wrap=True)
    reports = ("compare", "tables") if manifest.blocks else ("tables",)
    if options.executor is Executor.slurm:
        tasks = sum(len(job.tasks) for job in manifest.jobs)
        what = f"{counted(tasks, 'run')} as {counted(len(manifest.jobs), 'job')}"
        if tasks:
            ids = compact_ids(manifest.slurm_ids.values())
            console.print(f"submitted {what}; results go to {where}", soft_wrap=True)
            console.print(f"Slurm jobs: {ids}", highlight=False, soft_wrap=True)
        for name in ("status", "cancel", *reports):
            follow_up(command(name), where)
        return 0
    counts = Counter(record.status for record in records)
    if counts:
        summary = ", ".join(f"{count} {status}" for status, count in counts.most_common())
        console.print(f"{summary}; results are in {where}", soft_wrap=True)
    for name in reports:
        follow_up(command(name), where)
    failed = failed_records(records)
    if failed:
        follow_up(command("status"), where)
        follow_up(f"{command('logs')} {failed[0].run[:8]} --in", where)
    recorded = {(r.run, r.repeat) for r in records}
    cancelled = read_cancelled(manifest.path) - recorded
    if cancelled:
        errors.print(f"{counted(len(cancelled), 'run')} cancelled before the start")
    left_out = not_needed(manifest) - recorded
    if left_out:
        console.print(
            f"{counted(len(left_out), 'run')} not needed, because their blocks are decided"
        )
    lost = sum(len(job.tasks) for job in manifest.jobs) - len(recorded | cancelled | left_out)
    if lost > 0 and options.executor is Executor.local:
        errors.print(f"{counted(lost, 'run')} without a record; to see why, run:")
        follow_up(command("status"), where)
        return 1
    return 1 if failed or before or cancelled else 0


def _report_interrupt(manifest: Manifest) -> None:
    where = relative(manifest.folder)
    if manifest.executor is not Executor.slurm:
        text = f"finished runs are recorded in {where}"
    elif manifest.slurm_ids:
        text = f"Slurm jobs {compact_ids(manifest.slurm_ids.values())} stay submitted"
    elif manifest.slurm_jobs:
        text = "Slurm may have accepted jobs, which status will show"
    else:
        text = "nothing was submitted"
    errors.print(f"interrupted: {text}; repeat the command to continue", soft_wrap=True)
    if manifest.slurm_jobs:
        for name in ("status", "cancel"):
            follow_up(command(name), where)


def _start(prepared: Prepared, options: Options, lock: SubmitLock) -> list[Record]:
    """Start a submission. Runs on this machine continue if the reader of the output exits."""
    if options.executor is Executor.slurm:
        return start(prepared, options, console, lock)
    status = f"{command('status')} {shlex.quote(str(relative(prepared.manifest.folder)))}"
    note = "note: the output cannot be written, the runs continue; to see their states, run:"
    with outliving_output(f"{note}\n  {status}"):
        return start(prepared, options, console, lock)


def follow_up(words: str, folder: Path) -> None:
    """Print a command with the results folder as its last argument, on one line for copying.

    Args:
        words: the command without its last argument, quoted for a shell.
    """
    text = f"  {words} {shlex.quote(str(folder))}"
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _cluster_file(given: Path | None) -> Path | None:
    if given is not None:
        return given
    if "JOBS_CLUSTER" in os.environ:
        wrong = invalid_path(os.environ["JOBS_CLUSTER"])
        if wrong:
            fail(f"the environment variable JOBS_CLUSTER must name a cluster file: {wrong}")
        return Path(os.environ["JOBS_CLUSTER"])
    return Path(CLUSTER_FILE) if Path(CLUSTER_FILE).exists() else None
