"""The process of a Slurm job on a node: runs a worker, and handles the signals that Slurm sends.

    python -m jobs.launch.worker_task INDEX DIR/submissions/ID HASH CWD

It reads the job from the manifest, which must have the hash that the sbatch script gives. So nobody
who can write to the results folder can make the job execute anything else.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

from jobs.formatting import on_one_line
from jobs.printing import say
from jobs.results.manifest import BrokenManifest, read_manifest
from jobs.slurm_client import SlurmSilent, slurm_client
from jobs.worker.fork_server import adopt_orphans
from jobs.worker.recorder import job_id, slurm_facts
from jobs.worker.worker import Worker

# Time from Slurm's warning signal to the time limit, in seconds. In this time the worker kills the
# current run, writes its record and requeues the job.
SIGNAL_DELAY_S = 30
# A warning signal in this interval before the time limit, in seconds, is due to the limit, unless
# Slurm reports a preemption.
LIMIT_MARGIN_S = 120.0


def main(arguments: list[str]) -> None:
    """Run a job on this node. Exit with 2 if its manifest is not the one that was submitted."""
    index, submission, digest, cwd = arguments  # a container may start Python in another folder
    if os.environ.get("SLURM_LOCALID", "0") != "0":
        say("slurm.srun_args start several tasks per node; this one does nothing", sys.stderr)
        return
    adopt_orphans()  # those of a fork server that was killed
    try:
        os.chdir(cwd)
    except OSError as error:
        where = f"staying in {os.getcwd()}"
        say(f"cannot change to {cwd}: {error.strerror}; {where}", sys.stdout)
    try:
        manifest = read_manifest(Path(submission), digest=digest)
    except (OSError, BrokenManifest) as error:
        say(f"nothing is executed: {error}", sys.stderr)
        raise SystemExit(2) from None
    run(Worker(manifest, int(index), node_rank=int(os.environ.get("SLURM_NODEID", 0))))


def run(worker: Worker) -> None:
    """Run a worker, and handle the signals that Slurm sends."""
    signal.signal(signal.SIGTERM, lambda *_: _on_term(worker))
    signal.signal(signal.SIGUSR2, lambda *_: _on_warning(worker))
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGUSR2))
    try:
        worker.run()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # do not requeue a job that is done


def _on_warning(worker: Worker) -> None:
    """Handle Slurm's warning signal: stop and record the current run, and requeue the job.

    The signal arrives shortly before the time limit, or at a preemption. Before the limit, it
    may be a minute early. It is then sent again when only the wanted time is left.
    """
    if worker.node_rank > 0:
        return
    facts = _facts()
    left_s = _seconds_left(worker, facts)
    preempted = left_s >= LIMIT_MARGIN_S or _sigterm_reason(facts) in ("grace", "preempted")
    early_s = left_s - signal_delay_s(worker.job.timeout_min)
    if not preempted and early_s > 0.5:
        early = f"continuing for {early_s:.0f} s"
        say(f"Slurm's warning of the time limit is early; {early}", sys.stdout)
        signal.setitimer(signal.ITIMER_REAL, early_s)
        return
    begun, stuck = worker.has_begun, worker.is_stuck
    worker.stop("preempted" if preempted else "limit")
    if not preempted and not begun:  # it must not be requeued forever
        say("not requeued: no run began before the time limit", sys.stderr)
        raise SystemExit(1)
    if not preempted and stuck:  # nor this
        limit = f"the time limit of {worker.job.timeout_min} min is too short for a round"
        say(f"not requeued: {limit}; raise resources.timeout_min", sys.stderr)
        raise SystemExit(1)
    raise SystemExit(_requeue())


def _on_term(worker: Worker) -> None:
    """Handle SIGTERM from Slurm: record the current run and exit if the job is about to end."""
    leads, nodes = worker.node_rank == 0, worker.job.shape.nodes
    why = _sigterm_reason(_facts())
    if why == "grace":
        # Slurm would count a job that ends in its grace time as failed. So node 0 records the
        # current run and requeues the job, as after the warning signal. Other nodes wait.
        if leads:
            os.kill(os.getpid(), signal.SIGUSR2)
    elif why == "step" and leads and nodes > 1:
        pass  # the worker of another node has ended; this worker detects and records that
    else:
        worker.stop("preempted" if why == "preempted" else "cancelled")
        # With this exit code, the batch script restarts the job step. See `restarting_srun`.
        restart = why == "step" and nodes > 1
        raise SystemExit(128 + (signal.SIGKILL if restart else signal.SIGTERM))


def _requeue() -> int:
    """Ask Slurm to requeue this job, and return the exit code of the worker."""
    why = ""
    for pause in (0.0, 1.0, 3.0):
        time.sleep(pause)
        try:
            _scontrol("requeue")
            return 255  # ends the workers on other nodes
        except SlurmSilent as error:
            why = str(error)
    say(f"not requeued, its other runs are not executed: {why}; submit again", sys.stderr)
    return 1


def signal_delay_s(timeout_min: int) -> int:
    """Return the wanted time from the warning signal to the time limit, in seconds."""
    return min(SIGNAL_DELAY_S, 15 * timeout_min)


def _facts() -> dict[str, str]:
    """Return what Slurm knows about this job. If scontrol fails, print why and return nothing."""
    try:
        return dict(re.findall(r"(\w+)=(\S+)", _scontrol("show", "job", "-o")))
    except SlurmSilent as error:
        say(f"the reason of a signal is unknown: {error}", sys.stderr)
        return {}


def _scontrol(*command: str) -> str:
    """Return what scontrol prints about this job. Raises SlurmSilent, also if it fails."""
    done = slurm_client("scontrol", *command, job_id(slurm_facts()), timeout_s=5.0)
    if done.returncode:
        raise SlurmSilent(f"scontrol failed: {on_one_line(done.stderr)}")
    return done.stdout


def _seconds_left(worker: Worker, facts: dict[str, str]) -> float:
    """Return the time until the job's time limit, in seconds."""
    try:  # the limit may have been changed since the submission
        return time.mktime(time.strptime(facts["EndTime"], "%Y-%m-%dT%H:%M:%S")) - time.time()
    except (KeyError, ValueError):  # counted from a few seconds after the start of the job
        return worker.started + worker.job.timeout_min * 60 - time.monotonic()


def _sigterm_reason(facts: dict[str, str]) -> str:
    """Return why Slurm sent SIGTERM, from what it knows about the job.

    "grace": the job was preempted, but may run until the end of its grace time. "preempted": it was
    preempted or requeued, and is about to end. "step": only the job step is about to end.
    "cancelled": any other reason, or an unknown one.
    """
    # A running job has the state SIGNALING while Slurm delivers this signal.
    running = facts.get("JobState") in ("RUNNING", "SIGNALING")
    if facts.get("PreemptTime", "None") != "None":
        return "grace" if running else "preempted"
    if int(facts.get("Restarts", 0)) > int(os.environ.get("SLURM_RESTART_COUNT", 0)):
        return "preempted"
    return "step" if running else "cancelled"


if __name__ == "__main__":
    main(sys.argv[1:])
