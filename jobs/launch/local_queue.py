"""Local job queue: run the jobs of a submission on this machine as GPUs become free.

Each job runs in a worker process. Two jobs never share a GPU, also those of other queues on this
machine. A job without GPUs runs alone, because other jobs would disturb its timings, unless
`--parallel N` allows N jobs at the same time. A job with `resources.exclusive` always runs alone.
Other queues may run beside both. A job that this machine cannot run takes no GPUs: its worker
records its runs as unsupported.
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
from jobs.launch.packing import is_possible, most_at_once
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
    job: Job
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
        self.waiting = list(manifest.jobs)
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
                with self.progress:
                    while (self.waiting or self.running) and not (self.noted or self.unwritable):
                        self._start_what_fits()
                        time.sleep(POLL_S)
                        ended = [one for one in self.running if one.process.poll() is not None]
                        # After `poll`, so that the records of `ended` are complete.
                        self._collect()
                        for one in ended:
                            self._reap(one)
                        self.progress.update(one.job for one in self.running)
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

    def _gpus(self, job: Job) -> int:
        """Return how many GPUs a job takes."""
        return job.shape.gpus_per_node if is_possible(job.shape, self.total) else 0

    def _start_what_fits(self) -> None:
        refused = self.total + 1  # number of GPUs that other submissions do not leave
        for job in list(self.waiting):
            wanted = self._gpus(job)
            if wanted >= refused or not self._fits(job):
                continue
            claims = claim(self.free, wanted)
            if claims is not None:
                self.waiting.remove(job)
                self.free = [gpu for gpu in self.free if gpu not in claims]
                self._start(job, claims)
                continue
            refused = wanted
            if not self.running and not self.told:
                self.told = True
                self.progress.show(WAITS, "yellow")

    def _fits(self, job: Job) -> bool:
        together = [job, *(one.job for one in self.running)]
        most = min(most_at_once(one.shape, self.total, self.parallel) for one in together)
        return len(together) <= most and self._gpus(job) <= len(self.free)

    def _start(self, job: Job, claims: Claims, restarts: int = 0) -> None:
        cwd, environment = surroundings(self.manifest)
        if is_possible(job.shape, self.total):  # else the worker tells how many are visible
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(claims)
        with self._log(job).open("ab") as log:
            process = subprocess.Popen(
                self._command(job),
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only the queue, which stops the workers
                # The claims last as long as the worker.
                pass_fds=[one.fileno() for one in claims.values()],
            )
        self.running.append(_Running(job, process, claims, len(self._left(job)), restarts))

    def _command(self, job: Job) -> list[str]:
        worker = [sys.executable, "-u", "-m", "jobs.worker", "--parent", str(os.getpid())]
        return [*worker, str(self.manifest.path), str(job.index)]

    def _log(self, job: Job) -> Path:
        return self.manifest.job_folder(job.index) / "worker.log"

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
        left = len(self._left(one.job))
        restarts = 0 if left < one.left else one.restarts
        again = left > 0 and restarts < IDLE_RESTARTS
        if left == 0:
            then = "all its runs have a record"
        elif again:
            then = f"starting it again for {counted(left, 'run')}"
            self._start(one.job, one.claims, restarts + 1)
        else:
            then = f"not starting it again after {IDLE_RESTARTS + 1} deaths without a new result"
            with suppress(OSError):  # a full disk must not stop the other jobs
                write_worker_end(self.manifest.job_folder(one.job.index), end)
        how = f"{end.text(one.job.index)};"
        self.progress.show(how, "red", f" {then}; its log is {self._log(one.job)}")
        return again

    def _left(self, job: Job) -> set[TaskKey]:
        """Return the tasks of a job that a worker still has to execute."""
        done = {(r.run, r.repeat) for r in self.records if is_done_in_job(r, self.manifest.id)}
        return set(job.tasks) - done

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
