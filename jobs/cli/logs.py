"""The command `logs`: the output of one run."""

from __future__ import annotations

import shlex
import sys

from jobs.cli.arguments import In, RunId
from jobs.cli.observed import found_run
from jobs.results.manifest import ARTIFACTS
from jobs.results.run_logs import job_logs, log_of, on_all_nodes, text_of
from jobs.status import Status

EXAMPLES = "3fa2"


def logs(run: RunId, folder: In = None) -> None:
    """Print the output of a run and, if the run failed, the reason.

    Shows the attempt whose status `status` shows; of several repeats, one that failed if there is
    one, otherwise the one that finished last. If the run is in several folders, the folder of the
    last submission is preferred. If the run has no log file, prints the output of its job.

    While the run is running, also prints the command that follows its log file: tail -F PATH.
    """
    seen, task = found_run(run, folder)
    print(f"# {task.run.label()} -> {task.status} {task.detail}".rstrip())
    # That of an earlier attempt would stand above the output of a running one.
    failure = task.failure
    if failure is not None:
        print(f"# {failure.type}: {failure.message}")
    for left in sorted((seen.folder / ARTIFACTS).glob(f"{task.run.id}-{task.repeat}-*")):
        print(f"# artifacts in {left}")
    for each in seen.tasks:
        is_running = each.run.id == task.run.id and each.status is Status.running
        if is_running and (log := log_of(seen, each)):  # runs of --debug have no log
            paths = shlex.join(map(str, on_all_nodes(log)))
            print(f"# running; to follow its output: tail -F {paths}")
    shown = log_of(seen, task)
    if shown is None:
        for path in job_logs(seen, task):
            print(f"# the run has no log file; this is the output of its job, {path}:")
            sys.stdout.write(text_of(path))
        return
    text = text_of(shown)
    print(f"# {shown}")
    sys.stdout.write(text)
    if failure is not None and failure.traceback and failure.traceback not in text:
        print(f"# traceback:\n{failure.traceback}")  # a hang logs no traceback
