"""The command `cancel`: stop queued and running jobs."""

from __future__ import annotations

from jobs.cli.arguments import Folder
from jobs.cli.observed import observed
from jobs.cli.output import fail, note
from jobs.formatting import counted
from jobs.launch.cancel import await_end
from jobs.launch.cancel import cancel as cancel_jobs

EXAMPLES = "logs/flash"


def cancel(folder: Folder = None) -> None:
    """Cancel all queued and running jobs of a results folder.

    Records of finished runs are kept; submit the sweep again to continue it. The command waits up
    to a minute until the jobs have ended. Submissions of other users are never cancelled, and jobs
    of a cluster that does not answer are left alone.

    Exit code: 0 if all these jobs were cancelled, 2 if a job cannot be cancelled, for example
    because its queue runs on another host. The other jobs are cancelled.
    """
    seen = observed(folder)
    note(*seen.bad_lines)
    done = cancel_jobs(seen)
    count = sum(len(jobs) for _, jobs in done.stopped)
    print(f"cancelled {counted(count, 'job')} of {seen.folder}", flush=True)
    if ending := await_end(done):
        print(f"{counted(ending, 'job')} still ending; status shows when, then submit again")
    if done.problems:
        fail("\n".join(done.problems))
