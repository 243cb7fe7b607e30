"""The command `python -m jobs status`: the state of each run in a results folder."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table as Grid

from jobs.code.short_names import short_names
from jobs.commands.arguments import Folder
from jobs.commands.find import observed
from jobs.formatting import counted
from jobs.results.run_states import Observation, summary
from jobs.run import varying
from jobs.status import Status

console = Console(markup=False, emoji=False)


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
    seen = observed(folder, skip_broken=True)
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
