"""The worker: executes the runs of one job, one after another, inside the job's allocation.

Only workers write records. Except with `--debug`, a worker never imports torch, and starts each run
in a new process. So a run that crashes does not affect its worker, which records how it ended.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import uuid
from collections import Counter
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, Literal

from jobs import provenance
from jobs.block import Block, TaskKey, in_blocks
from jobs.formatting import counted
from jobs.printing import say
from jobs.results import unwritable
from jobs.results.counting import MAX_EXECUTIONS
from jobs.results.manifest import Executor, Manifest
from jobs.results.record import BlockPlace, Record
from jobs.results.slurm_job_states import exceeded_memory
from jobs.results.worker_state import WorkerState, read_worker_state, write_worker_state
from jobs.status import Status
from jobs.worker.conditions import ConditionSampler
from jobs.worker.environment import scoped_environment, thread_limit
from jobs.worker.isolation import Child, blocked_signals
from jobs.worker.judging import is_decided
from jobs.worker.messages import Outcome, Request
from jobs.worker.outcome import (
    failed,
    not_repeated,
    outcome_of_process,
    stopped,
)
from jobs.worker.ranks.node_connections import accept_workers, node_address
from jobs.worker.ranks.nodes import Part, follow, lead
from jobs.worker.ranks.rank_failures import outcome_of_ranks
from jobs.worker.recorder import Attempt, Conditions, Recorder, job_id, slurm_facts
from jobs.worker.run_process import execute
from jobs.worker.scratch import no_scratch
from jobs.worker.servers import ForkServers
from jobs.worker.turns import KnownResults, Turns

WARNING_S = 120.0  # time before the limit of a job in which a worker starts no further round
MAX_DEATHS = 2  # number of workers that may die during a run before the run is skipped
TERM_S = 0.5  # time in which a SIGTERM to the run also reaches the worker, in seconds


class Worker:
    """Executes one job of a submission on one node. Only the worker of node 0 writes records.

    `in_process` calls benchmarks in this process, without isolation and timeout, for `--debug`.
    """

    def __init__(
        self, manifest: Manifest, index: int, in_process: bool = False, node_rank: int = 0
    ):
        self.manifest = manifest
        self.job = manifest.jobs[index]
        self.in_process = in_process
        self.node_rank = node_rank
        self.folder = manifest.job_folder(index)
        self.started = time.monotonic()
        under_slurm = manifest.executor is Executor.slurm
        visible = provenance.visible_gpus()
        if under_slurm and "CUDA_VISIBLE_DEVICES" in os.environ:  # the GPUs that Slurm allocated
            visible = [t for t in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if t]
        self.gpus = visible[: self.job.shape.gpus_per_node]
        self.slurm = slurm_facts() if under_slurm else {}
        self.recorder = Recorder(manifest, self.job, self.gpus, self.slurm)
        self.known = KnownResults(manifest, self.job, self.recorder)
        self.executed = 0
        self.failures: list[Record] = []
        self._nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", 1)) if self.slurm else 1
        self._unsupported = self._unsupported_reason(len(visible))
        self._deaths: Counter[str] = Counter()  # of workers of this job, by the run they executed
        self._kept = 0  # number of runs and rounds that need not be executed again
        self._late = False  # whether the job has no time for another round
        self._current: Attempt | None = None
        self._child: Child | None = None
        self._servers = ForkServers(manifest, self.job, self.gpus)
        self._followers: list[Connection] = []  # to the workers of the other nodes

    def _unsupported_reason(self, visible: int) -> str | None:
        """Return why this machine has too few nodes or GPUs for the job, if it has."""
        shape = self.job.shape
        if shape.nodes > self._nodes:
            where = "Slurm allocated" if self.slurm else "a job that is not under Slurm has only"
            return f"needs {counted(shape.nodes, 'node')}, but {where} {self._nodes}"
        if shape.gpus_per_node > visible:
            offers = f"{counted(visible, 'GPU')} visible on {socket.gethostname()}"
            return f"needs {counted(shape.gpus_per_node, 'GPU')} per node, but {offers}"
        return None

    def run(self) -> None:
        """Execute the runs of the job that are not done, or record that they are unsupported."""
        nodes = min(self.job.shape.nodes, self._nodes)
        restarts = self.slurm.get("restart_count", "0")
        name = f"rendezvous-{self.slurm.get('job_id', '0')}-{restarts}.json"
        with scoped_environment(slurm=self.manifest.executor is not Executor.slurm):
            os.environ |= thread_limit(self.job.shape)
            try:
                if nodes > 1 and self.node_rank > 0:
                    meeting, why = self.folder / name, self._unsupported
                    follow(meeting, self.node_rank, self._servers, self.folder, why)
                elif self.node_rank == 0:
                    if nodes > 1:
                        self._followers = accept_workers(nodes - 1, self.folder / name)
                    self._run_tasks()
            finally:
                for follower in self._followers:
                    follower.close()  # ends the worker on that node
                self._servers.close()

    def _run_tasks(self) -> None:
        self.recorder.claim_job()
        unwritable.unmark(self.manifest.path, self.job.index)
        self._deaths = self._count_deaths()
        for block, tasks in in_blocks(self.job.tasks, self.manifest.blocks):
            if block is None:
                self._run_single(tasks[0])
            else:
                self._run_block(block, sorted({block.round_of(task) for task in tasks}))
            if self._stops_early:
                return
        self._write_state(None)

    @property
    def _stops_early(self) -> bool:  # as `--debug` does at a failure
        return self.in_process and bool(self.failures)

    def _run_single(self, task: TaskKey) -> None:
        self.known.refresh()
        is_done = any(map(self.known.is_result, self.known.of(task)))
        if not is_done:
            self._execute(task)
            self._kept += 1

    def _run_block(self, block: Block, rounds: list[int]) -> None:
        to_try = block.trial and not self.in_process and self._unsupported is None
        turns = Turns(block, self.manifest, to_try, self.known)
        longest_s = 0.0  # duration of a round
        for round in rounds:
            self.known.refresh()
            if round in turns.complete():
                continue
            # A failed round that is repeated was asked for. Only new rounds can be superfluous.
            is_new = not turns.was_executed(round)
            if block.auto and is_new and self._ends_early(block, turns, longest_s):
                return
            if to_try:
                self._run_trial(turns, round)
                to_try = False
            started = time.monotonic()
            for _ in range(MAX_EXECUTIONS):
                for task, place in turns.places(round):
                    self.known.refresh()
                    self._execute(task, place, turns)
                    if self._stops_early:
                        return
                self.known.refresh()
                if round in turns.complete():
                    self._kept += 1
                    break
            longest_s = max(longest_s, time.monotonic() - started)
        if block.auto:
            self._ends_early(block, turns, 0.0)

    def _ends_early(self, block: Block, turns: Turns, round_s: float) -> bool:
        """Save what a block says. Return whether it is decided, or no time is left for a round."""
        self._late |= bool(self.slurm) and self._seconds_left() < 1.2 * round_s
        done = len(turns.complete())
        return is_decided(self.manifest, self.folder, block, done, self._late) or self._late

    def _seconds_left(self) -> float:
        """Return the time in which a further round may be executed, in seconds."""
        limit_min = self.job.timeout_min
        return self.started + 60 * limit_min - time.monotonic() - min(WARNING_S, 15 * limit_min)

    def _run_trial(self, turns: Turns, round: int) -> None:
        """Execute and record the runs of a block once, except those that its rounds leave out."""
        for task, place in turns.places(round, trial=True):
            self.known.refresh()
            if not turns.lasting_failure(task[0]) and not turns.was_tried(task[0]):
                self._execute(task, place, turns)

    def _execute(
        self, task: TaskKey, place: BlockPlace | None = None, turns: Turns | None = None
    ) -> None:
        """Execute and record a run, or record why it is not executed. `turns` are of its block."""
        attempt = self._begin(task, place)
        before = turns.lasting_failure(task[0]) if turns is not None else None
        if self._unsupported is not None:
            self._record(attempt, failed(Status.unsupported, "Unsupported", self._unsupported))
        elif before is not None:
            self._record(attempt, not_repeated(before))
        elif self._deaths[f"{attempt.run.id}/{attempt.repeat}"] >= MAX_DEATHS:
            self._record(attempt, self._outcome_of_deaths())
        else:
            options = turns.options(task[0], place) if turns and place else None
            self._attempt_run(attempt, options)

    def _count_deaths(self) -> Counter[str]:
        """Return, for each run, the number of workers of this job that died while executing it."""
        state = read_worker_state(self.folder)
        deaths, running = Counter(state.deaths), state.running
        if running is not None:
            self.known.refresh()
            mine = (self.manifest.id, running.attempt)
            recorded = self.known.of((running.run, running.repeat))
            is_recorded = any((r.submission, r.attempt) == mine for r in recorded)
            deaths[f"{running.run}/{running.repeat}"] += not is_recorded
        return deaths

    def _outcome_of_deaths(self) -> Outcome:
        if self.slurm and exceeded_memory(self.manifest, job_id(self.slurm)):
            message = (
                f"Slurm ended the job step {MAX_DEATHS} times during this run, because it exceeded "
                "its memory limit; submit the sweep again with --retry-failed and a larger "
                "resources.mem_gb"
            )
            return failed(Status.oom, "OutOfMemory", message, memory="host")
        message = (
            f"the job's worker died {MAX_DEATHS} times during this run; see the job's log, "
            "and submit the sweep again to try once more"
        )
        return failed(Status.killed, "WorkerDied", message)

    def _write_state(self, attempt: Attempt | None) -> None:
        """Write state.json, for `jobs status` and the next worker of the job if this one dies."""
        running = attempt.as_state() if attempt else None
        state = WorkerState(running=running, deaths=dict(self._deaths))
        try:
            write_worker_state(self.folder, state)
        except OSError as error:  # a full disk must not end the job
            what = f"cannot write {self.folder}/state.json: {error.strerror}"
            say(f"{what}; `python -m jobs status` cannot show the current run", sys.stdout)

    def _begin(self, task: TaskKey, place: BlockPlace | None) -> Attempt:
        number = 1 + max((record.attempt for record in self.known.of(task)), default=0)
        while self.manifest.artifacts(*task, number).exists():
            number += 1  # an attempt without a record, because its worker died; keep its files
        return self.recorder.begin(self.manifest.runs[task[0]], task[1], number, place)

    def _attempt_run(self, attempt: Attempt, options: dict[str, Any] | None) -> None:
        self.recorder.require_job()
        if not self.in_process:
            attempt = self.recorder.claimed(attempt)
        self._current = attempt
        self._write_state(attempt)
        run = attempt.run
        request = Request(
            benchmark=run.benchmark,
            version=run.version,
            params=run.params,
            gpus=self.gpus,
            artifacts=str(attempt.artifacts.absolute()),
            token=uuid.uuid4().hex,
            asked_at=attempt.clock,
            log=None if self.in_process else str(attempt.log),
            round_options=options,
            # What a round imports depends on its options. All rounds need the same code anyway.
            checkout=run.checkout,
            nproc_per_node=run.shape.nproc_per_node,
            nodes=run.shape.nodes,
            host=node_address() if run.shape.nodes > 1 else "127.0.0.1",
        )
        try:
            with ConditionSampler(self.gpus) as sampler:
                outcome = self._run_and_wait(request, run.timeout_s)
            with blocked_signals():  # a signal handler calls `stop` before or after this block
                self._child = None
                self._record(attempt, outcome, sampler.by_phase(outcome.windows))
                self._current = None
        except KeyboardInterrupt:  # raised only with --debug
            self.stop("cancelled")
            raise
        self.executed += 1
        if outcome.failure is not None and outcome.failure.type == "NodeLost":
            raise SystemExit("the job ends because the worker on another node was lost")

    def _run_and_wait(self, request: Request, timeout_s: float) -> Outcome:
        alone = request.nproc_per_node is None
        if self.in_process and alone:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus)
            outcome = execute(request)
            if outcome.failure is not None and outcome.failure.type == "KeyboardInterrupt":
                raise KeyboardInterrupt
            return outcome
        server = self._servers.get(request.checkout)
        try:
            part = Part(server, request, timeout_s)
        except OSError as error:
            return no_scratch(error)
        self._child = part.child
        with part:
            nodes, expired = lead(part, [] if alone else self._followers)
        if nodes[0].exit_code == -signal.SIGTERM:
            time.sleep(TERM_S)  # Slurm may signal the worker a little later
        if alone:
            return outcome_of_process(nodes[0], expired, timeout_s)
        return outcome_of_ranks(nodes, expired, timeout_s, request.world_size)

    def _record(
        self, attempt: Attempt, outcome: Outcome, conditions: Conditions | None = None
    ) -> None:
        record = self.recorder.write(attempt, outcome, conditions)
        if record.status.is_failure:
            self.failures.append(record)

    @property
    def has_begun(self) -> bool:
        return self.executed > 0 or self._current is not None

    @property
    def is_stuck(self) -> bool:
        """Whether this worker has executed runs, all of which would have to be executed again."""
        return self.executed > 0 and self._kept == 0

    def stop(self, reason: Literal["preempted", "cancelled", "limit"]) -> None:
        with blocked_signals():
            if self._current is None:
                return
            attempt = self._current
            if self._child is not None:
                self._child.kill()
            outcome = stopped(reason, self.job.timeout_min, is_first=self.executed == 0)
            try:
                self._record(attempt, outcome)
            finally:
                self._current = None

    def handle_term(self) -> None:
        """Make SIGTERM, which the local queue sends, and SIGINT record the current run and exit."""

        def on_term(signum: int, frame: FrameType | None) -> None:
            self.stop("cancelled")
            raise SystemExit(128 + signum)

        signal.signal(signal.SIGTERM, on_term)
        signal.signal(signal.SIGINT, on_term)
