"""The command `logs`: the output of one run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from jobs.cli.arguments import In, RunId
from jobs.cli.consoles import fail
from jobs.cli.find import find_run
from jobs.cli.follow import follow
from jobs.results.manifest import ARTIFACTS
from jobs.results.run_logs import job_logs, log_of
from jobs.results.run_states import Observation, TaskState

EXAMPLES = "3fa2 --follow"


def logs(
    run: RunId,
    folder: In = None,
    follows: Annotated[
        bool,
        typer.Option(
            "--follow",
            "-f",
            help="Print the output while the run writes it, until the run ends. A queued run is "
            "waited for.",
        ),
    ] = False,
) -> None:
    """Print the output of a run and, if the run failed, the reason.

    Shows the latest attempt. If the run has several repeats, shows a repeat that failed if there is
    one, otherwise the repeat that finished last; with --follow, a repeat that is running or queued.
    If the run is in several folders, the folder of the last submission is preferred. If the run has
    no log file, prints the output of its job.
    """
    seen, task = find_run(run, folder, prefer_live=follows)
    if not follows or not task.status.is_live:
        _print(seen, task)
        return
    print(f"# {task.run.label()} -> {task.status}", flush=True)
    try:
        seen, task, printed = follow(seen, task)
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except FileNotFoundError as error:
        fail(str(error))
    _print(seen, task, printed)


def _print(seen: Observation, task: TaskState, printed: bool = False) -> None:
    """Print the status of a run, the reason of its failure, its artifacts and its output.

    If the output was printed before (`printed`), it is not printed again.
    """
    record = task.record
    print(f"# {task.run.label()} -> {task.status} {task.detail}".rstrip())
    failure = record.failure if record is not None else None
    if failure is not None:
        print(f"# {failure.type}: {failure.message}")
    for left in sorted((seen.folder / ARTIFACTS).glob(f"{task.run.id}-{task.repeat}-*")):
        print(f"# artifacts in {left}")
    shown = log_of(seen, task)
    if shown is None:
        for path in job_logs(seen, task):
            print(f"# the run has no log file; this is the output of its job, {path}:")
            sys.stdout.write(text_of(path))
        return
    text = text_of(shown)
    if not printed:
        print(f"# {shown}")
        sys.stdout.write(text)
    if failure is not None and failure.traceback and failure.traceback not in text:
        print(f"# traceback:\n{failure.traceback}")  # a hang logs no traceback


def text_of(path: Path) -> str:
    """Return the content of a log, or a line that says why it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        return f"# {path} cannot be read: {error.strerror}\n"
