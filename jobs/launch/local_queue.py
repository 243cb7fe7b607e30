"""Local job queue: run the jobs of a submission on this machine as GPUs become free.

Each job runs in a worker process. Two jobs never share a GPU, also those of other queues on this
machine. A job without GPUs runs alone, because other jobs would disturb its timings, unless
`--parallel N` allows N jobs at the same time. A job with `resources.exclusive` always runs alone.
Other queues may run beside both.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jobs import provenance
from jobs.block import TaskKey
from jobs.formatting import counted
from jobs.launch.gpu_claims import POLL_S, WAITS, Claims, claim, release
from jobs.launch.progress import QueueProgress
from jobs.launch.signals import noted_signals
from jobs.launch.snapshot import surroundings
from jobs.results import unwritable
from jobs.results.counting import is_done_in_job
from jobs.results.manifest import Job, Manifest
from jobs.results.record import Record
from jobs.results.record_reader import RecordTail
from jobs.results.unwritable import ResultsUnwritable
from jobs.results.worker_state import IDLE_RESTARTS, WorkerEnd, write_worker_end

STOP_S = 20.0  # grace period in which stopped workers record their runs, in seconds


@dataclass
class _Running:
    jobs: list[Job]
    process: subprocess.Popen[bytes]
    claims: Claims  # of its GPUs
    left: int  # number of runs without a result when this worker was started
    restarts: int = 0  # earlier workers in a row that died without a new result


class LocalQueue:
    """Queue that runs the jobs of one submission on this machine."""

    def __init__(self, manifest: Manifest, parallel: int | None):
        self.manifest = manifest
        self.parallel = parallel
        self.free = provenance.visible_gpus()
        self.total = len(self.free)
        self.waiting = [job for job in manifest.jobs if self._can_run(job)]
        self.running: list[_Running] = []
        self.records: list[Record] = []
        self.told = False  # whether this queue said that it waits for other queues
        self.noted: list[int] = []  # signals that have arrived
        self.unwritable = False  # whether a worker could not write a record
        self.tail = RecordTail(manifest.folder, set(manifest.runs))
        self.progress = QueueProgress(manifest)

    def run(self) -> list[Record]:
        """Run all jobs and return the records of this submission.

        Raises:
            ResultsUnwritable: if a worker could not write a record. The others were stopped.
            KeyboardInterrupt: if SIGINT, SIGTERM or SIGHUP arrived. Each worker has then recorded
                its current run as cancelled and exited.
        """
        with noted_signals() as self.noted:
            try:
                impossible = [job for job in self.manifest.jobs if not self._can_run(job)]
                if impossible:  # a worker records their runs as unsupported
                    self._start(impossible, {})
                with self.progress:
                    while (self.waiting or self.running) and not (self.noted or self.unwritable):
                        self._start_what_fits()
                        time.sleep(POLL_S)
                        ended = [one for one in self.running if one.process.poll() is not None]
                        # After `poll`, so that the records of `ended` are complete.
                        self._collect()
                        for one in ended:
                            self._reap(one)
                        self.progress.update(job for one in self.running for job in one.jobs)
                    self._stop_workers()
                    self._collect()
            finally:
                self._stop_workers()
        if signal.SIGHUP in self.noted:
            _leave_terminal()
        if self.noted:
            raise KeyboardInterrupt
        if self.unwritable:
            folder = self.manifest.folder
            words = unwritable.problem(folder, self.manifest.path)
            raise ResultsUnwritable(words or unwritable.message(folder, None))
        return self.records

    def _can_run(self, job: Job) -> bool:
        """Return whether this machine has enough GPUs and nodes for a job."""
        return job.shape.gpus_per_node <= self.total and job.shape.nodes == 1

    def _start_what_fits(self) -> None:
        refused = self.total + 1  # number of GPUs that other submissions do not leave
        for job in list(self.waiting):
            wanted = job.shape.gpus_per_node
            if wanted >= refused or not self._fits(job):
                continue
            claims = claim(self.free, wanted)
            if claims is not None:
                self.waiting.remove(job)
                self.free = [gpu for gpu in self.free if gpu not in claims]
                self._start([job], claims)
                continue
            refused = wanted
            if not self.running and not self.told:
                self.told = True
                self.progress.show(WAITS, "yellow")

    def _fits(self, job: Job) -> bool:
        gpus = job.shape.gpus_per_node
        running = [other for one in self.running for other in one.jobs]
        if any(one.shape.exclusive for one in [job, *running]):
            return not running
        if self.parallel is not None:
            return len(self.running) < self.parallel and gpus <= len(self.free)
        if not gpus or any(not one.shape.gpus_per_node for one in running):
            return not running
        return gpus <= len(self.free)

    def _start(self, jobs: list[Job], claims: Claims, restarts: int = 0) -> None:
        cwd, environment = surroundings(self.manifest)
        if self._can_run(jobs[0]):
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(claims)
        with self._log(jobs).open("ab") as log:
            process = subprocess.Popen(
                self._command(jobs),
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only the queue, which stops the workers
                # The claims last as long as the worker.
                pass_fds=[one.fileno() for one in claims.values()],
            )
        self.running.append(_Running(jobs, process, claims, len(self._left(jobs)), restarts))

    def _command(self, jobs: list[Job]) -> list[str]:
        worker = [sys.executable, "-u", "-m", "jobs.worker", "--parent", str(os.getpid())]
        return [*worker, str(self.manifest.path), *(str(job.index) for job in jobs)]

    def _log(self, jobs: list[Job]) -> Path:
        return self.manifest.job_folder(jobs[0].index) / "worker.log"

    def _reap(self, one: _Running) -> None:
        self.running.remove(one)
        code = one.process.returncode
        if code == unwritable.EXIT_CODE:
            self.unwritable = True  # this worker could not record later runs either
        elif code != 0 and not self.noted and self._started_again(one):
            return
        self.free += one.claims
        release(one.claims)

    def _started_again(self, one: _Running) -> bool:
        """Start a worker that died again, if runs are left and earlier deaths made progress.

        Return whether it was started.
        """
        end = WorkerEnd(pid=one.process.pid, exit_code=one.process.returncode, at=time.time())
        left = len(self._left(one.jobs))
        restarts = 0 if left < one.left else one.restarts
        again = left > 0 and restarts < IDLE_RESTARTS
        if left == 0:
            then = "all its runs have a record"
        elif again:
            then = f"starting it again for {counted(left, 'run')}"
            self._start(one.jobs, one.claims, restarts + 1)
        else:
            then = f"not starting it again after {IDLE_RESTARTS + 1} deaths without a new result"
            for job in one.jobs:
                with suppress(OSError):  # a full disk must not stop the other jobs
                    write_worker_end(self.manifest.job_folder(job.index), end)
        how = f"{end.text(one.jobs[0].index)};"
        self.progress.show(how, "red", f" {then}; its log is {self._log(one.jobs)}")
        return again

    def _left(self, jobs: list[Job]) -> set[TaskKey]:
        """Return the tasks of some jobs that a worker still has to execute."""
        done = {(r.run, r.repeat) for r in self.records if is_done_in_job(r, self.manifest.id)}
        return {task for job in jobs for task in job.tasks} - done

    def _collect(self) -> None:
        for record in self.tail.new():
            if record.submission == self.manifest.id:
                self.records.append(record)
                self.progress.add(record)

    def _stop_workers(self) -> None:
        for one in self.running:
            one.process.terminate()
        deadline = time.monotonic() + STOP_S
        for one in self.running:
            try:
                one.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                one.process.kill()
                one.process.wait()
            release(one.claims)
        self.running.clear()


def _leave_terminal() -> None:
    """Redirect stdout and stderr to /dev/null, because writing to a closed terminal fails."""
    for number in (1, 2):
        if stat.S_ISCHR(os.fstat(number).st_mode):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
