"""The command `logs`: the output of one run."""

from __future__ import annotations

import sys
from typing import Annotated

from jobs.cli.arguments import In, RunId, flag
from jobs.cli.follow import follow
from jobs.cli.observed import found_run
from jobs.results.manifest import ARTIFACTS
from jobs.results.run_logs import job_logs, log_of, text_of
from jobs.results.run_states import Observation, TaskState

EXAMPLES = "3fa2 --follow"


def logs(
    run: RunId,
    folder: In = None,
    follows: Annotated[
        bool,
        flag(
            "--follow",
            "Print the output while the run writes it, until the run ends.",
            short="-f",
        ),
    ] = False,
) -> None:
    """Print the output of a run and, if the run failed, the reason.

    Shows the latest attempt. If the run has several repeats, shows a repeat that failed if there is
    one, otherwise the repeat that finished last; with --follow, a repeat that is running or queued.
    If the run is in several folders, the folder of the last submission is preferred. If the run has
    no log file, prints the output of its job.
    """
    seen, task = found_run(run, folder, prefer_live=follows)
    printed = False
    if follows and task.status.is_live:
        print(f"# {task.run.label()} -> {task.status}", flush=True)
        seen, task, printed = follow(seen, task)
    _print(seen, task, printed)


def _print(seen: Observation, task: TaskState, printed: bool) -> None:
    """Print the status of a run, why it failed, its artifacts, and its output if not `printed`."""
    print(f"# {task.run.label()} -> {task.status} {task.detail}".rstrip())
    failure = task.record.failure if task.record is not None else None
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
