"""The command `submit`: run a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jobs.cli.arguments import RESULTS, as_path, flag
from jobs.cli.completion import sweep_files
from jobs.cli.output import fail, note
from jobs.cli.preview import preview
from jobs.cli.submission import locked, plan, start
from jobs.launch.against import find
from jobs.launch.plan_submission import Options
from jobs.results.latest import LOGS
from jobs.results.manifest import Executor
from jobs.sweep.load import load_sweep
from jobs.user_files import unusable_results

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
CLUSTER_FILE = Path("cluster.yaml")  # read if no other is given


def submit(
    sweep: Annotated[
        Path,
        typer.Argument(
            metavar="SWEEP",
            help="Sweep file, for example sweeps/flash.yaml.",
            parser=as_path,
            autocompletion=sweep_files,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Overrides: a benchmark parameter (dtype=bf16, or 'seq_len=[128,256]' for every "
            "value) or a key of the sweep file (repeats=3, slurm.partition=h100).",
        ),
    ] = None,
    cluster: Annotated[
        Executor | None,
        typer.Option(
            help="Where to run the jobs: Slurm, this machine, or the foreground. [default: slurm]"
        ),
    ] = None,
    local: Annotated[
        bool,
        flag(
            "--local",
            "Same as --cluster local: run the jobs on this machine, one or more per GPU at a time.",
        ),
    ] = False,
    debug: Annotated[
        bool,
        flag(
            "--debug",
            "Same as --cluster debug: execute the runs in the foreground and stop at the first "
            "failure. A run without torchrun executes in this process and has no timeout.",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        flag("--dry-run", "Print runs, jobs, the expected time and GPU-hours, and write nothing."),
    ] = False,
    sbatch: Annotated[
        bool, flag("--sbatch", "With --dry-run, also print the sbatch script of each job array.")
    ] = False,
    where: Annotated[
        str | None,
        typer.Option(
            "--where",
            "--filter",
            metavar="CONDITION",
            help="Keep only runs that satisfy this condition on parameters and benchmark, for "
            "example 'seq_len > 4096 and dtype in [bf16, fp16]'. [default: all runs]",
        ),
    ] = None,
    rounds: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            help="How often the runs of blocks are executed, see blocks.rounds. [default: that of "
            "the sweep]",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Results folder. Runs that already have a result in it are skipped. [default: "
            "logs/<sweep name>]",
            **RESULTS,
        ),
    ] = None,
    retry_failed: Annotated[
        bool,
        flag(
            "--retry-failed",
            "Also repeat runs that ended as oom, timeout, error or wrong. Killed, preempted, "
            "cancelled and missing runs are always repeated.",
        ),
    ] = False,
    force: Annotated[
        bool,
        flag(
            "--force", "Execute all runs, also those that have a result or are queued or running."
        ),
    ] = False,
    repeat_unknown: Annotated[
        bool,
        flag(
            "--repeat-unknown",
            "Submit also runs for whose jobs Slurm does not answer. They may be executed twice.",
        ),
    ] = False,
    keep_stale: Annotated[
        bool,
        flag(
            "--keep-stale",
            "Skip also runs whose results are from older code, instead of measuring them again.",
        ),
    ] = False,
    parallel: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --local, the maximum number of jobs at the same time. [default: as many as "
            "the GPUs allow; a job without GPUs runs alone]",
        ),
    ] = None,
    snapshot: Annotated[
        bool,
        flag(
            "--snapshot",
            "Copy the files that git tracks, here and in this project, with uncommitted changes "
            "into the results folder, and run the jobs from the copy. You can then edit while jobs "
            "wait.",
        ),
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="REV|DIR",
            help="Measure each run also with another checkout of the code: a git revision such as "
            "HEAD, which is the code without uncommitted edits, or a folder. The two are measured "
            "in turn. The command compare compares them.",
        ),
    ] = None,
    cluster_file: Annotated[
        Path | None,
        typer.Option(
            help="YAML file with the keys 'slurm' and 'resources', over which the sweep file takes "
            "precedence. [default: ./cluster.yaml if it exists]",
            envvar="JOBS_CLUSTER",
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
    if parallel is not None and executor is not Executor.local:
        fail(f"--parallel requires --local, got --parallel {parallel} with executor {executor}")
    for option, given in (("--snapshot", snapshot), ("--against", against is not None)):
        if given and executor is Executor.debug:
            fail(f"{option} is not allowed together with --debug")
    if out is not None and (wrong := unusable_results(out)):
        fail(f"--out {wrong}")
    settings = cluster_file or (CLUSTER_FILE if CLUSTER_FILE.exists() else None)
    loaded = load_sweep(sweep, overrides or [], where, settings, rounds)
    if loaded.sweep.blocks and any(text.startswith("rounds=") for text in overrides or []):
        note("rounds is a parameter of the benchmark; --rounds sets the rounds of blocks")
    options = Options(
        executor,
        out or LOGS / loaded.sweep.name,
        retry_failed=retry_failed,
        force=force,
        parallel=parallel,
        snapshot=snapshot,
        keep_stale=keep_stale,
        repeat_unknown=repeat_unknown,
        against=None if against is None else find(against),
    )
    if dry_run:
        # Without the file, the jobs go to the default partition, which often has no GPUs.
        cluster_settings = f"settings of {settings}" if settings else "no cluster.yaml here"
        preview(plan(loaded, options, str(sweep)), cluster_settings, sbatch)
        return
    with locked(options) as lock:
        code = start(plan(loaded, options, str(sweep)), lock)
    raise SystemExit(code)
