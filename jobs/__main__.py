"""Commands for submitted sweeps: `python -m jobs status|logs|cancel|retry|replay|check|carry`."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
import yaml
from rich.console import Console
from rich.table import Table as Grid

from jobs.arguments import as_path, run_prefix
from jobs.check import check
from jobs.code.git import GitError
from jobs.code.short_names import short_names
from jobs.code.state import repository_root, write_carried
from jobs.completion import results_folders, run_ids
from jobs.errors import InputError
from jobs.formatting import counted
from jobs.invocation import words
from jobs.launch.snapshot import SnapshotError
from jobs.launch.submission import Options, prepare, reload
from jobs.results.manifest import (
    ARTIFACTS,
    SUBMISSIONS,
    BrokenManifest,
    Executor,
    Manifest,
    read_manifests,
)
from jobs.results.run_states import Observation, TaskState, observe, summary
from jobs.run import varying
from jobs.status import Status
from jobs.submit import fail, start_and_report
from jobs.sweep.benchmarks import NoBenchmark, load_benchmark

console = Console(markup=False, emoji=False)
app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    no_args_is_help=True,
    epilog="These commands inspect and control what was submitted with python -m jobs.submit. "
    "Example: python -m jobs status logs/flash",
)
Folder = Annotated[
    Path | None,
    typer.Argument(
        help="Results folder. [default: the folder in ./logs with the newest submission]",
        parser=as_path,
        autocompletion=results_folders,
    ),
]
In = Annotated[
    Path | None,
    typer.Option(
        "--in",
        help="Results folder that contains the run. [default: search all folders in ./logs]",
        parser=as_path,
        autocompletion=results_folders,
    ),
]
RunId = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="Id of a run, or its first characters, for example 3fa2. "
        "'python -m jobs status --json' lists the ids of all runs.",
        parser=run_prefix,
        autocompletion=run_ids,
    ),
]


@app.command(epilog="Example: python -m jobs status logs/flash --json")
def status(
    folder: Folder = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the submissions and the state of every run as JSON."),
    ] = False,
) -> None:
    """Show the state of each run in a results folder.

    Prints the number of runs in each state: queued, running, missing, or the status with which a
    run ended (ok, oom, timeout, error, wrong, unsupported, killed, preempted, cancelled). Then it
    lists the runs that are neither ok nor queued, with the reason.

    Exit code: 0 if no run failed, 1 if a run failed or is missing. The states ok, oom, unsupported,
    queued and running are not failures.
    """
    seen = _observe(folder)
    if as_json:
        print(json.dumps(summary(seen)))
    else:
        _show(seen)
    raise SystemExit(1 if any(task.status.is_failure for task in seen.tasks) else 0)


def _show(seen: Observation) -> None:
    newest = seen.manifests[-1]
    console.print(
        f"{seen.folder}: sweep {newest.sweep.name}, {counted(len(seen.tasks), 'run')}, "
        f"{counted(len(seen.manifests), 'submission')} (executor of the newest: {newest.executor})",
        soft_wrap=True,
    )
    grid = Grid.grid(padding=(0, 2))
    for state, count in sorted(seen.counts().items(), key=lambda item: -item[1]):
        grid.add_row("", state, str(count), _waits_for(seen) if state is Status.queued else "")
    console.print(grid)
    runs = [task.run for task in seen.tasks]
    names = varying(runs)
    references = {reference for run in runs for reference in run.code}
    short = short_names(references, (value for run in runs for value in run.params.values()))
    others = [task for task in seen.tasks if task.status not in (Status.ok, Status.queued)]
    for task in others[:30]:
        failure = task.record.failure if task.record and not task.status.is_live else None
        why = (
            f"{failure.type}: {failure.message.splitlines()[0][:150]}"
            if failure and failure.message
            else failure.type
            if failure
            else task.detail
        )
        repeat = f" repeat={task.repeat}" if newest.sweep.repeats > 1 else ""
        text = f"  {task.status:11} {task.run.id}  {task.run.label(names, short)}{repeat}  {why}"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    if len(others) > 30:
        console.print(f"  … and {len(others) - 30} more; --json lists all")
    for line in (*map(str, seen.bad_lines), *seen.notes):
        console.print(f"  note: {line}", markup=False, highlight=False, soft_wrap=True)


def _waits_for(seen: Observation) -> str:
    """Return Slurm's reasons why jobs are pending, for example "Priority, Resources".

    Args:
        seen: states of all runs in a results folder.
    """
    details = (task.detail for task in seen.tasks if task.status is Status.queued)
    reasons = (detail.partition("PENDING (")[2].removesuffix(")") for detail in details)
    return ", ".join(dict.fromkeys(filter(None, reasons)))


@app.command(epilog="Example: python -m jobs logs 3fa2")
def logs(run: RunId, folder: In = None) -> None:
    """Print the output of a run and, if the run failed, the reason.

    Shows the latest attempt. If the run has several repeats or is in several folders, shows a
    repeat that failed if there is one, otherwise the repeat that finished last. If the run has no
    log file, prints the output of its job.
    """
    seen, task = _find(run, folder)
    record = task.record
    print(f"# {task.run.label()} -> {task.status} {task.detail}".rstrip())
    failure = record.failure if record is not None else None
    if failure is not None:
        print(f"# {failure.type}: {failure.message}")
    for left in sorted((seen.folder / ARTIFACTS).glob(f"{task.run.id}-{task.repeat}-*")):
        print(f"# artifacts in {left}")
    paths = sorted(
        seen.folder.glob(f"{SUBMISSIONS}/*/jobs/*/{task.run.id}-{task.repeat}-*.log"),
        key=lambda path: path.stat().st_mtime,
    )
    shown = seen.folder / record.log if record is not None and record.log else None
    if shown is None or not shown.exists():
        shown = paths[-1] if paths else None
    if shown is not None:
        print(f"# {shown}")
        text = shown.read_text(errors="replace")
        sys.stdout.write(text)
        if failure is not None and failure.traceback and failure.traceback not in text:
            print(f"# traceback:\n{failure.traceback}")  # a hang logs no traceback
    else:
        for path in _job_logs(seen, task):
            print(f"# the run has no log file; this is the output of its job, {path}:")
            sys.stdout.write(path.read_text(errors="replace"))


def _job_logs(seen: Observation, task: TaskState) -> list[Path]:
    """Return the log files of the newest job that contains a run. Empty files are left out.

    Args:
        seen: states of all runs in a results folder.
        task: state of the run.
    """
    for manifest in reversed(seen.manifests):
        for job in manifest.jobs:
            if (task.run.id, task.repeat) in job.tasks:
                job_id = manifest.slurm_ids.get(job.index, "-")
                found = sorted((manifest.path / "slurm").glob(f"{job_id}_*log.*"))
                found += [p for p in [manifest.job_folder(job.index) / "worker.log"] if p.exists()]
                return [p for p in found if p.stat().st_size]
    return []


@app.command(epilog="Example: python -m jobs cancel logs/flash")
def cancel(folder: Folder = None) -> None:
    """Cancel all queued and running jobs of a results folder.

    Cancels the jobs of all submissions in the folder. Records of finished runs are kept. To
    continue the sweep, submit it again.
    """
    seen = _observe(folder)
    live = {(task.run.id, task.repeat) for task in seen.tasks if task.status.is_live}
    cancelled = 0
    for manifest in seen.manifests:
        states = seen.job_states[manifest.id]
        jobs = [j for j in manifest.jobs if states[j.index].status.is_live and live & set(j.tasks)]
        if not jobs:
            continue
        cancelled += len(jobs)
        if manifest.executor is Executor.slurm:
            ids = [manifest.slurm_ids[job.index] for job in jobs]
            for start in range(0, len(ids), 500):  # command lines have a maximum length
                done = subprocess.run(
                    ["scancel", *ids[start : start + 500]], capture_output=True, text=True
                )
                if done.returncode:
                    fail(f"scancel failed: {done.stderr.strip()}")
        else:
            _stop_process(manifest)
    console.print(f"cancelled {counted(cancelled, 'job')} of {seen.folder}", soft_wrap=True)


def _stop_process(manifest: Manifest) -> None:
    process = manifest.process
    if process is None:
        return
    if not process.is_on_this_host:
        fail(f"submission {manifest.id} runs on host {process.host}; run this command on that host")
    if process.is_running:
        os.kill(process.pid, signal.SIGTERM)


@app.command(epilog="Example: python -m jobs retry logs/flash")
def retry(folder: Folder = None) -> None:
    """Submit the failed and missing runs of a results folder again.

    Finds the newest submission that contains a failed or missing run. Submits all failed, missing
    and out-of-memory (oom) runs of this submission again, to the same executor (Slurm, local or
    debug). Runs that are ok, unsupported, queued or running are not submitted.

    The exit codes are those of python -m jobs.submit.
    """
    seen = _observe(folder)
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


@app.command(epilog="Example: python -m jobs replay 3fa2")
def replay(run: RunId, folder: In = None) -> None:
    """Repeat one run on this machine in the foreground.

    Writes a sweep file with only this run to ./logs/replay, prints the command that executes it
    (python -m jobs.submit ... --debug), and executes the command. The record of the run is also
    written to ./logs/replay.
    """
    _, task = _find(run, folder)
    shape = task.run.shape
    try:
        defaults = load_benchmark(task.run.benchmark).json_defaults
    except NoBenchmark as error:
        fail(str(error))
    sweep: dict[str, object] = {
        "name": "replay",
        "benchmark": task.run.benchmark,
        "fixed": {k: v for k, v in task.run.params.items() if defaults.get(k, ...) != v},
        "timeout_s": task.run.timeout_s,
        "resources": {"gpus_per_node": shape.gpus_per_node, "nodes": shape.nodes},
    }
    if shape.nproc_per_node is not None:
        sweep["launch"] = {"nproc_per_node": shape.nproc_per_node}
    path = Path("logs/replay") / f"{task.run.id}.yaml"  # the results folder may be read-only
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(sweep), encoding="utf-8")
    command = [*words("submit"), str(path), "--debug", "--force", "--out", "logs/replay"]
    print(shlex.join(command), flush=True)
    raise SystemExit(subprocess.run(command).returncode)


@app.command(epilog="Example: python -m jobs carry && rsync -a --exclude .git ./ gpubox:sweeps/")
def carry() -> None:
    """Write the state of this git repository to the file .code_state.json in its root.

    Run it before you copy the repository without .git to another machine. The file contains the
    commit, the uncommitted changes of tracked files, and a hash of each tracked file. Runs on the
    other machine record this commit, and whether files differ from the repository.
    """
    root = repository_root(Path.cwd())
    if root is None or not (root / ".git").exists():
        fail(f"the current folder must be in a git repository, got {str(Path.cwd())!r}")
    try:
        print(f"wrote {write_carried(root)}")
    except GitError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename or root}: {error.strerror}")


def _observe(folder: Path | None) -> Observation:
    try:
        return observe((folder or _latest()).resolve())
    except (FileNotFoundError, BrokenManifest) as error:
        fail(str(error))


def _folders() -> list[Path]:
    return sorted(
        {path.parents[2] for path in Path("logs").glob(f"*/{SUBMISSIONS}/*/manifest.json")}
    )


def _latest() -> Path:
    try:
        newest = [(read_manifests(folder)[-1].created_at, folder) for folder in _folders()]
    except BrokenManifest as error:
        fail(str(error))
    if not newest:
        fail("no results folder given, and none found in ./logs; pass the folder as an argument")
    return max(newest)[1]


def _find(run: str, folder: Path | None) -> tuple[Observation, TaskState]:
    found = []
    for path in [folder] if folder else _folders():
        seen = _observe(path)
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


app.command(epilog="Example: python -m jobs check my_kernels/flash.py:MyFlash")(check)


if __name__ == "__main__":
    app()
