"""Executes a run that has a single process, and kills the process at the timeout."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

from jobs.worker.fork_server import EXIT_S
from jobs.worker.isolation import Child, ForkServer, oom_kills
from jobs.worker.messages import Outcome, Request
from jobs.worker.outcome import died, scratch_failed, timed_out
from jobs.worker.run_process import run_alone
from jobs.worker.scratch import collect, outcome_file

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
    expired = not child.wait(timeout_s)
    if expired and outcome_file(request.scratch).exists():
        expired = not child.wait(EXIT_S)  # the run has measured; only its exit is slow
    if expired:
        child.stacks(Path(request.scratch))
    found = collect(request, kills, child)
    if found.outcomes:
        return found.outcomes[0]
    if found.undelivered is not None:
        return scratch_failed(found.undelivered)
    if expired:
        return timed_out(timeout_s, found.stacks)
    if found.exit_code == -signal.SIGTERM:
        time.sleep(TERM_S)  # Slurm may signal the worker a little later
    return died(found.exit_code, found.stacks or found.log_end, found.out_of_memory)
