"""The command `cancel`: stop queued and running jobs."""

from __future__ import annotations

from jobs.cli.arguments import Folder, Where
from jobs.cli.observed import observed
from jobs.cli.output import fail
from jobs.cli.where import matching
from jobs.formatting import counted
from jobs.launch.cancel import await_end
from jobs.launch.cancel import cancel as cancel_jobs

EXAMPLES = "logs/flash --where 'dtype == fp16'"


def cancel(folder: Folder = None, where: Where = None) -> None:
    """Cancel all queued and running jobs of a results folder.

    Records of finished runs are kept; submit the sweep again to continue it. The command waits up
    to a minute until the jobs have ended. Submissions of other users are never cancelled, and jobs
    of a cluster that does not answer are left alone.

    With --where, cancels only runs that satisfy the condition. A job is cancelled if all of its
    queued and running runs satisfy it. In other jobs, these runs are skipped when their turn comes,
    and a run that executes now is left to end.

    Exit code: 0 if all these jobs were cancelled, 2 if a job cannot be cancelled, for example
    because its queue runs on another host. The other jobs are cancelled.
    """
    seen = observed(folder)
    chosen = None if where is None else matching(seen, where).tasks
    done = cancel_jobs(seen, chosen)
    text = f"cancelled {counted(done.jobs, 'job')} of {seen.folder}"
    if done.skipped:
        text += f"; {counted(done.skipped, 'run')} of jobs that continue will be skipped"
    if done.left:
        text += f"; {counted(done.left, 'executing run')} of jobs that continue left to end"
    if chosen is not None and not any(task.status.is_live for task in chosen):
        text += ": no queued or running run satisfies the condition"
    print(text, flush=True)
    if ending := await_end(done):
        print(f"{counted(ending, 'job')} still ending; status shows when, then submit again")
    if done.problems:
        fail("\n".join(done.problems))
