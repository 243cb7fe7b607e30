"""Command line for submitting a sweep: `python -m jobs.submit SWEEP [KEY=VALUE]...`."""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.table import Table as Grid

from jobs.completion import key_values, results_folders, sweep_files
from jobs.errors import InputError
from jobs.formatting import counted
from jobs.invocation import command
from jobs.launch.packing import worst_case_gpu_hours
from jobs.launch.snapshot import SnapshotError
from jobs.launch.submission import Options, Prepared, failed_records, prepare, start
from jobs.results import unwritable
from jobs.results.manifest import BrokenManifest, Executor
from jobs.results.record import Record
from jobs.results.record_reader import iter_records
from jobs.run import Run, varying
from jobs.sweep.load import load_sweep

CLUSTER_FILE = "cluster.yaml"
SHOWN_RUNS = 10
console = Console(markup=False, emoji=False)
errors = Console(stderr=True, markup=False, emoji=False)
app = typer.Typer(add_completion=False, rich_markup_mode=None)


EPILOG = """
Examples:

\b
  # Submit to Slurm
  python -m jobs.submit sweeps/flash.yaml
  # Show what would be submitted, with the sbatch scripts
  python -m jobs.submit sweeps/flash.yaml --dry-run --sbatch
  # Run on this machine, without Slurm
  python -m jobs.submit sweeps/quickstart.yaml --local
  # Debug some of the runs in this process
  python -m jobs.submit sweeps/flash.yaml --debug --filter 'seq_len == 128'
  # Change a parameter and the results folder
  python -m jobs.submit sweeps/flash.yaml 'seq_len=[128,256]' --out logs/mine
"""


@app.command(epilog=EPILOG)
def submit(
    sweep: Annotated[
        Path,
        typer.Argument(
            help="Sweep file, for example sweeps/flash.yaml.", autocompletion=sweep_files
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Overrides of the sweep file. KEY is a benchmark parameter (dtype=bf16; a list "
            "such as 'seq_len=[128,256]' runs every value), a key of the sweep file (repeats=3), "
            "or a nested key (slurm.partition=h100).",
            autocompletion=key_values,
        ),
    ] = None,
    cluster: Annotated[
        Executor,
        typer.Option(
            help="Where to run: 'slurm' submits the jobs to Slurm, 'local' runs them on this "
            "machine, and 'debug' runs them in the foreground."
        ),
    ] = Executor.slurm,
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
    filter: Annotated[
        str | None,
        typer.Option(
            help="Keep only the runs whose parameters satisfy this condition, for example 'seq_len "
            "> 4096 and dtype in [bf16, fp16]'. Operators: ==, !=, <, <=, >, >=, in, not in, and, "
            "or, not. [default: all runs]"
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Results folder. Runs that already have a result in it are skipped. [default: "
            "logs/<sweep name>]",
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
            "$JOBS_CLUSTER, else ./cluster.yaml if it exists]"
        ),
    ] = None,
) -> None:
    """Run a sweep: expand its file into runs, group them into jobs, and start the jobs.

    A run is skipped if it has already succeeded or failed in the results folder, or if it is queued
    or running. Repeat the same command to continue an interrupted sweep. Add --retry-failed to
    repeat failed runs.

    Exit code: 0 if the jobs were submitted to Slurm, or if every run ended as ok, oom or
    unsupported; 1 if a run failed, now or in an earlier submission; 2 if the input is invalid or
    the submission failed; 130 if interrupted.
    """
    if (local and debug) or ((local or debug) and cluster is not Executor.slurm):
        fail("only one of --local, --debug and --cluster is allowed")
    executor = Executor.local if local else Executor.debug if debug else cluster
    if sbatch and not dry_run:
        fail("--sbatch requires --dry-run")
    if snapshot and executor is Executor.debug:
        fail("--snapshot is not allowed together with --debug")
    try:
        loaded = load_sweep(sweep, overrides or [], filter, _cluster_file(cluster_file))
        options = Options(
            executor,
            out or Path("logs") / loaded.sweep.name,
            retry_failed,
            force,
            parallel,
            snapshot,
            save_untracked,
        )
        prepared = prepare(loaded, options, str(sweep))
    except (InputError, BrokenManifest, SnapshotError) as error:
        fail(str(error))
    for warning in prepared.expansion.warnings:
        errors.print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True)
    for note in prepared.notes:
        errors.print(f"note: {note}", highlight=False, soft_wrap=True)
    if dry_run:
        show_plan(prepared, executor, sbatch)
        return
    raise SystemExit(start_and_report(prepared, options))


def start_and_report(prepared: Prepared, options: Options) -> int:
    """Start a prepared submission, then print a summary and the commands that show its results.

    Returns:
        The exit code of the command. Its values are listed in `submit`.
    """
    manifest = prepared.manifest
    where = _relative(manifest.folder)
    before = prepared.failed_before
    if len(prepared.done) > len(before):
        kept = len(prepared.done) - len(before)
        console.print(f"skipping {counted(kept, 'run')} with a result")
    if before:
        kinds = ", ".join(
            f"{n} {status}" for status, n in Counter(r.status for r in before).items()
        )
        note = (
            f"skipping {counted(len(before), 'run')} that failed before ({kinds}); "
            "--retry-failed repeats failed runs"
        )
        errors.print(note, soft_wrap=True, highlight=False)
    if prepared.in_flight:
        count = counted(len(prepared.in_flight), "run")
        console.print(f"skipping {count} already queued or running")
    if not manifest.jobs and not prepared.in_flight and not prepared.done:
        fail("nothing to run: the sweep has no runs")
    try:
        records = start(prepared, options, console)
    except KeyboardInterrupt:
        message = (
            f"interrupted: finished runs are recorded in {where}; repeat the command to continue"
        )
        errors.print(message, highlight=False, markup=False, soft_wrap=True)
        return 130
    except OSError as error:
        full = error.errno in unwritable.FULL
        fail(
            unwritable.message(manifest.folder, error.errno)
            if full
            else f"{error.filename or where}: {error.strerror}"
        )
    except RuntimeError as error:  # SubmissionError, FolderInUse or ResultsUnwritable
        fail(str(error))
    if options.executor is Executor.slurm:
        tasks = sum(len(job.tasks) for job in manifest.jobs)
        what = f"{counted(tasks, 'run')} as {counted(len(manifest.jobs), 'job')}"
        console.print(f"submitted {what}; results go to {where}", soft_wrap=True)
        for name in ("status", "cancel", "tables"):
            follow_up(command(name), where)
        return 0
    counts = Counter(record.status for record in records)
    if counts:
        summary = ", ".join(f"{count} {status}" for status, count in counts.most_common())
        console.print(f"{summary}; results are in {where}", soft_wrap=True)
    follow_up(command("tables"), where)
    failed = failed_records(records)
    if failed:
        follow_up(command("status"), where)
        follow_up(f"{command('logs')} {failed[0].run[:8]} --in", where)
    lost = sum(len(job.tasks) for job in manifest.jobs) - len({(r.run, r.repeat) for r in records})
    if lost > 0 and options.executor is Executor.local:
        errors.print(f"{counted(lost, 'run')} without a record; to see why, run:")
        follow_up(command("status"), where)
        return 1
    return 1 if failed or before else 0


def follow_up(words: str, folder: Path) -> None:
    """Print a command with the results folder as its last argument, on one line for copying.

    Args:
        words: the command without its last argument, quoted for a shell.
        folder: the results folder.
    """
    text = f"  {words} {shlex.quote(str(folder))}"
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def show_plan(prepared: Prepared, executor: Executor, sbatch: bool) -> None:
    """Print the plan of a submission: runs, jobs, job arrays, expected time and GPU-hours."""
    manifest, expansion = prepared.manifest, prepared.expansion
    tasks = sum(len(job.tasks) for job in manifest.jobs)
    grid = Grid.grid(padding=(0, 2))
    repeats = manifest.sweep.repeats
    benchmarks = dict.fromkeys(run.benchmark for run in expansion.runs)
    left_out = [
        f"{count} {what}"
        for count, what in (
            (expansion.excluded, "excluded"),
            (expansion.filtered, "filtered out"),
            (expansion.duplicates, "duplicates"),
        )
        if count
    ]
    runs = f"{len(expansion.runs)}" + (f" x {repeats} repeats" if repeats > 1 else "")
    per_job = counted(manifest.sweep.runs_per_job, "run")
    rows = [
        ("sweep", f"{manifest.sweep.name} ({', '.join(benchmarks)})"),
        ("runs", runs + (f" ({', '.join(left_out)})" if left_out else "")),
        (
            "to run",
            f"{tasks} ({len(prepared.done)} done, {len(prepared.in_flight)} queued or running)",
        ),
        ("jobs", f"{len(manifest.jobs)}, with at most {per_job} each"),
    ]
    if executor is Executor.slurm or sbatch:
        from jobs.launch.slurm_executor import arrays, max_array_size

        rows.append(("arrays", str(len(arrays(manifest, max_array_size())))))
    rows += [
        ("expected", _expected(prepared)),
        ("at most", f"{worst_case_gpu_hours(manifest.jobs):.1f} GPU-hours, not counting requeues"),
        ("results", str(_relative(manifest.folder))),
    ]
    for row in rows:
        grid.add_row(*row)
    console.print(grid, highlight=False)
    shapes = Counter(job.shape for job in manifest.jobs)
    for shape, count in shapes.items():
        limit = max(job.timeout_min for job in manifest.jobs if job.shape == shape)
        jobs = counted(count, "job")
        console.print(f"  {jobs} of {shape}, at most {limit} min each", highlight=False)
    names = varying(expansion.runs)
    for run in expansion.runs[:SHOWN_RUNS]:
        console.print(f"  {run.id}  {run.label(names)}", highlight=False, soft_wrap=True)
    if len(expansion.runs) > SHOWN_RUNS:
        console.print(f"  … and {len(expansion.runs) - SHOWN_RUNS} more")
    if sbatch:
        from jobs.launch.slurm_executor import sbatch_texts

        for text in sbatch_texts(manifest):
            print(text)


def _expected(prepared: Prepared) -> str:
    """Return an estimate of the total run time of a planned submission, as text.

    The estimate uses the durations of earlier runs with the same benchmark and parameters that
    ended as ok. Their records are read from the results folder and from all folders
    logs/*/<sweep name>. The reference results of this repository are in such folders.
    """
    manifest = prepared.manifest
    took: dict[str, float] = {}
    source = ""
    for folder in (manifest.folder, *sorted(Path("logs").glob(f"*/{manifest.sweep.name}"))):
        for record in iter_records(folder) if manifest.jobs else ():
            if isinstance(record, Record) and record.status == "ok":
                took.setdefault(_point(record), record.finished_at - record.started_at)
                source = source or str(_relative(folder))
    wanted = [_point(manifest.runs[run]) for job in manifest.jobs for run, _ in job.tasks]
    known = [took[run] for run in wanted if run in took]
    if not wanted:
        return "nothing to run"
    if not known:
        return "unknown: these runs have no earlier records"
    minutes = sum(known) / len(known) * len(wanted) / 60
    return (
        f"{minutes:.0f} min of run time (from records of {len(known)} of {len(wanted)} runs in "
        f"{source})"
    )


def _point(of: Run | Record) -> str:
    """Return a key that is equal for runs and records with the same benchmark and parameters.

    The key is used to estimate run times. It does not contain the version of the benchmark, because
    a new version hardly changes the run time.
    """
    return json.dumps([of.benchmark, of.params], sort_keys=True)


def _cluster_file(given: Path | None) -> Path | None:
    if given is not None:
        return given
    if "JOBS_CLUSTER" in os.environ:
        return Path(os.environ["JOBS_CLUSTER"])
    return Path(CLUSTER_FILE) if Path(CLUSTER_FILE).exists() else None


def _relative(path: Path) -> Path:
    try:
        return path.resolve().relative_to(Path.cwd())
    except ValueError:
        return path


def fail(message: str) -> NoReturn:
    """Print an error message and exit with code 2."""
    errors.print(message, style="red", highlight=False, markup=False, soft_wrap=True)
    raise SystemExit(2)


if __name__ == "__main__":
    app()
