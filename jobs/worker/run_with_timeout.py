"""Executes a run that has a single process, and kills the process at the timeout."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

from jobs.worker.fork_server import EXIT_S
from jobs.worker.isolation import Child, ForkServer, oom_kills, read_stacks
from jobs.worker.messages import Outcome, Request
from jobs.worker.outcome import died, scratch_failed, timed_out, undelivered
from jobs.worker.run_process import run_alone
from jobs.worker.torchrun import log_end

TERM_S = 0.5  # time in which a SIGTERM to the run also reaches the worker, in seconds


def run_with_timeout(
    server: ForkServer,
    request: Request,
    timeout_s: float,
    on_start: Callable[[Child], object],
) -> Outcome:
    """Run a benchmark in a separate process, and return its outcome."""
    kills = oom_kills()
    child = server.start(run_alone, request, scratch=request.scratch)
    on_start(child)
    scratch = Path(request.scratch)
    path = scratch / "outcome0.json"
    expired = not child.wait(timeout_s)
    if expired and path.exists():
        expired = not child.wait(EXIT_S)  # the run has measured; only its exit is slow
    stacks = child.stacks(scratch) if expired else read_stacks(scratch)
    child.kill()
    if path.exists():
        return Outcome.read(path)
    problem = undelivered(scratch)
    if problem is not None:
        return scratch_failed(problem)
    if expired:
        return timed_out(timeout_s, stacks)
    if child.exit_code == -signal.SIGTERM:
        time.sleep(TERM_S)  # Slurm may signal the worker a little later
    return died(child.exit_code, stacks or log_end(request.log), oom_kills() > kills)
