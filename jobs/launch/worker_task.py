"""The callable that submitit runs in a Slurm job: it runs a worker and handles Slurm's signals."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import submitit
from submitit.slurm.slurm import SlurmJobEnvironment

from jobs.printing import say
from jobs.results.manifest import read_manifest
from jobs.slurm_client import SlurmSilent, slurm_client
from jobs.worker.fork_server import adopt_orphans
from jobs.worker.worker import Stopped, Worker

# Time from Slurm's warning signal to the time limit, in seconds. In this time the worker kills the
# current run and writes its record, and submitit requeues the job.
SIGNAL_DELAY_S = 30
# Interval before the job's time limit, in seconds. A warning signal that Slurm sends in this
# interval is due to the time limit, unless Slurm reports a preemption.
LIMIT_MARGIN_S = 120.0


class WorkerTask:
    """Callable that runs one job. submitit pickles it and calls it inside the allocation.

    Args:
        index: index of the job in the submission's manifest.
        cwd: current folder of the job. A container may start Python in another folder. None: stay
            in the folder in which Python was started.
    """

    cwd: str | None = None  # jobs that an older version of the project submitted do not set it

    def __init__(self, submission: Path, index: int, cwd: str | None = None):
        # A str, because a pickled Path depends on the version of Python (see slurm.python).
        self.submission, self.index, self.cwd = str(submission), index, cwd
        self.worker: Worker | None = None

    def __call__(self) -> None:
        adopt_orphans()  # those of a fork server that was killed
        if self.cwd is not None:
            try:
                os.chdir(self.cwd)
            except OSError as error:
                where = f"staying in {os.getcwd()}"
                say(f"cannot change to {self.cwd}: {error.strerror}; {where}", sys.stdout)
        node_rank = int(os.environ.get("SLURM_NODEID", 0))
        manifest = read_manifest(Path(self.submission))
        self.worker = Worker(manifest, self.index, node_rank=node_rank)
        signal.signal(signal.SIGTERM, self._on_term)
        self._requeue = signal.getsignal(signal.SIGUSR2)  # submitit's handler
        signal.signal(signal.SIGUSR2, self._on_warning)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGUSR2))
        try:
            self.worker.run()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)  # do not requeue a job that is done

    def _on_warning(self, signum: int, frame: FrameType | None) -> None:
        """Handle Slurm's warning signal: requeue the job through submitit and `checkpoint`.

        Slurm checks time limits so rarely that the signal may arrive a minute early. A short job
        would then have no time for its runs. If the warning is due to the time limit, the handler
        therefore sends the signal again when only the wanted time is left.
        """
        assert self.worker is not None
        if self.worker.node_rank == 0 and _is_near_limit(self.worker):
            early_s = _seconds_left(self.worker) - signal_delay_s(self.worker.job.timeout_min)
            if early_s > 0.5 and _sigterm_reason() not in ("grace", "preempted"):
                early = f"continuing for {early_s:.0f} s"
                say(f"Slurm's warning of the time limit is early; {early}", sys.stdout)
                signal.setitimer(signal.ITIMER_REAL, early_s)
                return
        if callable(self._requeue):
            self._requeue(signum, frame)

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Prepare the requeue of this job by Slurm. submitit calls this method.

        submitit calls the method on Slurm's warning signal, which arrives shortly before the time
        limit or at a preemption. The method kills the run that is executing and writes its record.
        After the requeue, the new worker skips the runs that are done.

        Returns:
            The submission of a new `WorkerTask`, which runs the job after the requeue.
        """
        if self.worker is not None:
            limit = _is_near_limit(self.worker) and _sigterm_reason() not in ("grace", "preempted")
            self.worker.stop("limit" if limit else "preempted")
        again = WorkerTask(Path(self.submission), self.index, self.cwd)
        return submitit.helpers.DelayedSubmission(again)

    def _on_term(self, signum: int, frame: FrameType | None) -> None:
        """Handle SIGTERM from Slurm.

        If the job is about to end, the handler records the current run and exits. If the job was
        preempted but has a grace time left, node 0 records the current run and requeues the job. If
        only a worker on another node has ended, node 0 continues.
        """
        assert self.worker is not None
        leads, nodes = self.worker.node_rank == 0, self.worker.job.shape.nodes
        why = _sigterm_reason()
        if why == "grace":
            # Slurm would count a job that ends in its grace time as failed. Handle SIGTERM like the
            # warning signal (SIGUSR2): node 0 records the current run and requeues the job. The
            # other nodes wait.
            if leads:
                os.kill(os.getpid(), signal.SIGUSR2)
        elif why == "step" and leads and nodes > 1:
            pass  # the worker of another node has ended; this worker detects and records that
        else:
            self.worker.stop("preempted" if why == "preempted" else "cancelled")
            # With this exit code, the batch script restarts the job step. See `sbatch_setup`.
            restart = why == "step" and nodes > 1
            raise Stopped(128 + (signal.SIGKILL if restart else signum))


def signal_delay_s(timeout_min: int) -> int:
    """Return the wanted time from the warning signal to the time limit, in seconds."""
    return min(SIGNAL_DELAY_S, 15 * timeout_min)


def _is_near_limit(worker: Worker) -> bool:
    """Return whether a warning signal from Slurm is probably due to the time limit."""
    return _seconds_left(worker) < LIMIT_MARGIN_S


def _seconds_left(worker: Worker) -> float:
    """Return the time until the job's time limit, in seconds.

    Older versions of Slurm do not set SLURM_JOB_END_TIME. The limit is then counted from the start
    of the worker, a few seconds after the start of the job.
    """
    limit = worker.job.timeout_min * 60
    left = worker.started + limit - time.monotonic()
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    return min(left, int(end) - time.time()) if end.isdigit() else left


def _sigterm_reason() -> str:
    """Return why Slurm sent SIGTERM.

    Returns:
        "grace": the job was preempted, but may run until the end of its grace time.
        "preempted": the job was preempted or requeued, and is about to end.
        "step": only the job step is about to end. The job continues.
        "cancelled": any other reason, or scontrol does not answer.
    """
    command = ("scontrol", "show", "job", "-o", SlurmJobEnvironment().job_id)
    try:
        done = slurm_client(*command, timeout_s=5.0)
    except SlurmSilent:
        return "cancelled"
    fields = dict(re.findall(r"(\w+)=(\S+)", done.stdout))
    # A running job has the state SIGNALING while Slurm delivers this signal.
    running = fields.get("JobState") in ("RUNNING", "SIGNALING")
    if fields.get("PreemptTime", "None") != "None":
        return "grace" if running else "preempted"
    if int(fields.get("Restarts", 0)) > int(os.environ.get("SLURM_RESTART_COUNT", 0)):
        return "preempted"
    return "step" if running else "cancelled"
