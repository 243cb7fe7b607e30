"""The launcher's command line: `python -m jobs.submit SWEEP [key=value ...]`."""

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

from jobs.errors import InputError
from jobs.launch.packing import worst_case_gpu_hours
from jobs.launch.submission import Options, Prepared, failed_records, prepare, start
from jobs.results.manifest import BrokenManifest, Executor
from jobs.results.record import Record
from jobs.results.record_reader import iter_records
from jobs.run import Run, varying
from jobs.sweep.load import load_sweep

CLUSTER_FILE = "cluster.yaml"
SHOWN_RUNS = 10
console = Console(markup=False)
errors = Console(stderr=True, markup=False)
app = typer.Typer(add_completion=False, rich_markup_mode=None)


EPILOG = """
Examples:

\b
  python -m jobs.submit sweeps/flash.yaml                 submit to Slurm
  python -m jobs.submit sweeps/flash.yaml --dry-run       what would run
  python -m jobs.submit sweeps/quickstart.yaml --local    queue on this machine
  python -m jobs.submit sweeps/flash.yaml --debug --filter 'seq_len == 128'
  python -m jobs.submit sweeps/flash.yaml seq_len=[128,256] --out logs/mine
"""


@app.command(epilog=EPILOG)
def submit(
    sweep: Annotated[Path, typer.Argument(help="The sweep file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Set a parameter (seq_len=[128,256]), a key of the sweep (repeats=3) or a dotted "
            "path (slurm.partition=h100).",
        ),
    ] = None,
    cluster: Annotated[Executor, typer.Option(help="Where to run.")] = Executor.slurm,
    local: Annotated[bool, typer.Option("--local", help="Short for --cluster local.")] = False,
    debug: Annotated[
        bool,
        typer.Option(
            "--debug", help="Short for --cluster debug: in this process, up to the first failure."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would run; run nothing.")
    ] = False,
    sbatch: Annotated[
        bool, typer.Option("--sbatch", help="With --dry-run: the sbatch text too.")
    ] = False,
    filter: Annotated[
        str | None,
        typer.Option(
            help="Only the runs for which this holds: 'seq_len > 4096 and dtype == bf16'."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Results folder [default: logs/<sweep name>].")
    ] = None,
    retry_failed: Annotated[
        bool,
        typer.Option(
            "--retry-failed", help="Run again what ended as oom, timeout, error or wrong."
        ),
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Run everything, measured or not.")
    ] = False,
    parallel: Annotated[
        int | None,
        typer.Option(min=1, help="With --local: the most jobs at once [default: one a GPU, or 1]."),
    ] = None,
    cluster_file: Annotated[
        Path | None,
        typer.Option(
            help="Partition, account and the like [default: $JOBS_CLUSTER, else ./cluster.yaml]."
        ),
    ] = None,
) -> None:
    """Expand a sweep file into jobs and run them on Slurm, on this machine, or in this process."""
    if (local and debug) or ((local or debug) and cluster is not Executor.slurm):
        fail("give one of --local, --debug and --cluster")
    executor = Executor.local if local else Executor.debug if debug else cluster
    if sbatch and not dry_run:
        fail("--sbatch goes with --dry-run")
    try:
        loaded = load_sweep(sweep, overrides or [], filter, _cluster_file(cluster_file))
        options = Options(
            executor, out or Path("logs") / loaded.sweep.name, retry_failed, force, parallel
        )
        prepared = prepare(loaded, options, str(sweep))
    except (InputError, BrokenManifest) as error:
        fail(str(error))
    for warning in prepared.expansion.warnings:
        errors.print(f"warning: {warning}", style="yellow", highlight=False, soft_wrap=True)
    if dry_run:
        show_plan(prepared, executor, sbatch)
        return
    raise SystemExit(start_and_report(prepared, options))


def start_and_report(prepared: Prepared, options: Options) -> int:
    """Start a prepared submission and print how to follow it. Returns the exit code."""
    manifest = prepared.manifest
    where = _relative(manifest.folder)
    before = prepared.failed_before
    if len(prepared.done) > len(before):
        kept = len(prepared.done) - len(before)
        console.print(f"{kept} runs were measured before and stay as they are")
    if before:
        kinds = ", ".join(
            f"{n} {status}" for status, n in Counter(r.status for r in before).items()
        )
        note = f"{len(before)} runs failed before ({kinds}); --retry-failed runs them again"
        errors.print(note, soft_wrap=True, highlight=False)
    if prepared.in_flight:
        console.print(f"{len(prepared.in_flight)} runs are queued or running already")
    if not manifest.jobs and not prepared.in_flight and not prepared.done:
        fail("nothing to run")
    try:
        records = start(prepared, options, console)
    except KeyboardInterrupt:
        message = (
            f"interrupted; what was measured is in {where}; the same command goes on from there"
        )
        errors.print(message, highlight=False, markup=False, soft_wrap=True)
        return 130
    except OSError as error:
        fail(f"{error.filename or where}: {error.strerror}")
    except RuntimeError as error:  # SubmissionError: what Slurm, or its absence, says
        fail(str(error))
    if options.executor is Executor.slurm:
        tasks = sum(len(job.tasks) for job in manifest.jobs)
        jobs = len(manifest.jobs)
        console.print(
            f"submitted {tasks} runs as {jobs} jobs; results go to {where}", soft_wrap=True
        )
        for command in ("python -m jobs status", "python -m jobs cancel", _tables_command()):
            follow_up(command, where)
        return 0
    counts = Counter(record.status for record in records)
    if counts:
        summary = ", ".join(f"{count} {status}" for status, count in counts.most_common())
        console.print(f"{summary}; results are in {where}", soft_wrap=True)
    follow_up(_tables_command(), where)
    lost = sum(len(job.tasks) for job in manifest.jobs) - len({(r.run, r.repeat) for r in records})
    if lost > 0 and options.executor is Executor.local:
        errors.print(f"{lost} runs left no record:")
        follow_up("python -m jobs status", where)
        return 1
    return 1 if failed_records(records) or before else 0


def follow_up(command: str, folder: Path) -> None:
    """A command to copy, in one line."""
    text = f"  {command} {shlex.quote(str(folder))}"
    console.print(text, highlight=False, markup=False, soft_wrap=True)


def _tables_command() -> str:
    """The command that prints tables: by the script where it is here, as in a checkout."""
    return "python aggregate.py" if Path("aggregate.py").exists() else "python -m aggregate"


def show_plan(prepared: Prepared, executor: Executor, sbatch: bool) -> None:
    """What would run: runs, jobs, arrays, minutes, GPU-hours."""
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
    rows = [
        ("sweep", f"{manifest.sweep.name} ({', '.join(benchmarks)})"),
        ("runs", runs + (f" ({', '.join(left_out)})" if left_out else "")),
        ("to run", f"{tasks} ({len(prepared.done)} done, {len(prepared.in_flight)} in flight)"),
        ("jobs", f"{len(manifest.jobs)}, {manifest.sweep.runs_per_job} runs a job at most"),
    ]
    if executor is Executor.slurm or sbatch:
        from jobs.launch.slurm_executor import arrays, max_array_size

        rows.append(("arrays", str(len(arrays(manifest, max_array_size())))))
    rows += [
        ("expected", _expected(prepared)),
        ("at worst", f"{worst_case_gpu_hours(manifest.jobs):.1f} GPU-hours, without requeues"),
        ("results", str(_relative(manifest.folder))),
    ]
    for row in rows:
        grid.add_row(*row)
    console.print(grid, highlight=False)
    shapes = Counter(job.shape for job in manifest.jobs)
    for shape, count in shapes.items():
        limit = max(job.timeout_min for job in manifest.jobs if job.shape == shape)
        console.print(f"  {count} jobs of {shape}, {limit} min at most", highlight=False)
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
    """Minutes of running time, from records of the same runs here or in the reference results."""
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
        return "nothing to do"
    if not known:
        return "not known: no earlier records of these runs"
    minutes = sum(known) / len(known) * len(wanted) / 60
    return (
        f"{minutes:.0f} min of running time (from {len(known)} of {len(wanted)} runs in {source})"
    )


def _point(of: Run | Record) -> str:
    """What was measured, whatever the benchmark's version: enough to guess how long it takes."""
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
    """Say what is wrong and leave with 2."""
    errors.print(message, style="red", highlight=False, markup=False, soft_wrap=True)
    raise SystemExit(2)


if __name__ == "__main__":
    app()
