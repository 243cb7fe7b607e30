"""Local job queue: run the jobs of a submission on this machine as GPUs become free.

Each job runs in a worker process in the background. Two jobs of one queue never share a GPU. A job
without GPUs runs alone, because other jobs would disturb its timings. With `--parallel N`, up to N
jobs run at the same time, including jobs without GPUs. Queues on different results folders are not
coordinated and may use the same GPUs.
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
from types import FrameType

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from jobs import provenance
from jobs.launch.snapshot import place
from jobs.processes import ProcessHandle
from jobs.results import unwritable
from jobs.results.manifest import Job, Manifest, write_handles
from jobs.results.record import Record
from jobs.results.record_reader import RecordTail
from jobs.results.unwritable import ResultsUnwritable
from jobs.sweep.schema import Sweep

POLL_S = 0.1
STOP_S = 20.0  # grace period in which stopped workers record their runs, in seconds


@dataclass
class _Running:
    jobs: list[Job]
    process: subprocess.Popen[bytes]
    gpus: list[str]


class LocalQueue:
    """Queue that runs the jobs of one submission on this machine.

    Args:
        manifest: manifest of the submission.
        parallel: maximum number of jobs that run at the same time. None: as many as the GPUs allow,
            and a job without GPUs runs alone.
        console: console on which progress is shown.
    """

    def __init__(self, manifest: Manifest, parallel: int | None, console: Console):
        self.manifest = manifest
        self.parallel = parallel
        self.console = console
        self.free = list(dict.fromkeys(provenance.visible_gpus()))
        self.total = len(self.free)
        self.waiting = [job for job in manifest.jobs if self._can_run(job)]
        self.running: list[_Running] = []
        self.records: list[Record] = []
        self.stopped = False
        self.unwritable = False  # whether a worker could not write a record

    def run(self) -> list[Record]:
        """Run all jobs and return the records of this submission.

        If SIGINT, SIGTERM or SIGHUP arrives, each worker records its current run as cancelled and
        exits.

        Raises:
            ResultsUnwritable: if a worker could not write a record. No more jobs are started, and
                the other workers are stopped.
            KeyboardInterrupt: if one of these signals arrived. It is raised after the workers have
                exited.
        """
        self._write_handles(interrupted=False)
        before = {s: signal.signal(s, self._on_stop) for s in _stop_signals()}
        tail = RecordTail(self.manifest.folder, set(self.manifest.runs))
        total = sum(len(job.tasks) for job in self.manifest.jobs)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        try:
            impossible = [job for job in self.manifest.jobs if not self._can_run(job)]
            if impossible:
                self._start(impossible, [])
            with Progress(
                *columns, console=self.console, disable=not self.console.is_terminal
            ) as bar:
                task = bar.add_task(self.manifest.sweep.name, total=total)
                while (self.waiting or self.running) and not (self.stopped or self.unwritable):
                    self._start_what_fits()
                    time.sleep(POLL_S)
                    self._collect(tail, bar, task)
                    self._reap()
                if self.stopped:
                    self._stop_workers()
                    with suppress(OSError):  # a full disk: `jobs status` then shows killed
                        self._write_handles(interrupted=True)
                self._collect(tail, bar, task)
        finally:
            self._stop_workers()
            for number, handler in before.items():
                signal.signal(number, handler)
        if self.stopped:
            raise KeyboardInterrupt
        if self.unwritable:
            folder = self.manifest.folder
            words = unwritable.problem(folder, self.manifest.path)
            raise ResultsUnwritable(words or unwritable.message(folder, None))
        return self.records

    def _write_handles(self, interrupted: bool) -> None:
        """Write to the file handles.json that this process runs all jobs of the submission.

        `jobs status` and `jobs cancel` read the file to find the process.

        Args:
            interrupted: whether a signal has stopped the queue.
        """
        handle = ProcessHandle.of_this_process(interrupted)
        self.manifest.handles.update({job.index: handle for job in self.manifest.jobs})
        write_handles(self.manifest)

    def _on_stop(self, signum: int, frame: FrameType | None) -> None:
        self.stopped = True
        if signum == signal.SIGHUP:
            _leave_terminal()

    def _can_run(self, job: Job) -> bool:
        """Return whether this machine has enough GPUs and nodes for a job.

        If not, a worker records the runs of the job as unsupported.
        """
        return job.shape.gpus_per_node <= self.total and job.shape.nodes == 1

    def _start_what_fits(self) -> None:
        for job in list(self.waiting):
            if self._fits(job):
                self.waiting.remove(job)
                wanted = job.shape.gpus_per_node
                gpus, self.free = self.free[:wanted], self.free[wanted:]
                self._start([job], gpus)

    def _fits(self, job: Job) -> bool:
        gpus = job.shape.gpus_per_node
        if self.parallel is not None:
            return len(self.running) < self.parallel and gpus <= len(self.free)
        if not gpus or any(not job.shape.gpus_per_node for one in self.running for job in one.jobs):
            return not self.running
        return gpus <= len(self.free)

    def _start(self, jobs: list[Job], gpus: list[str]) -> None:
        cwd, environment = place(self.manifest)
        if self._can_run(jobs[0]):
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        with self._log(jobs).open("ab") as log:
            process = subprocess.Popen(
                self._command(jobs),
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches only the queue, which stops the workers
            )
        self.running.append(_Running(jobs, process, gpus))

    def _command(self, jobs: list[Job]) -> list[str]:
        worker = [sys.executable, "-u", "-m", "jobs.worker", "--parent", str(os.getpid())]
        return [*worker, str(self.manifest.path), *(str(job.index) for job in jobs)]

    def _log(self, jobs: list[Job]) -> Path:
        return self.manifest.job_folder(jobs[0].index) / "worker.log"

    def _reap(self) -> None:
        for one in list(self.running):
            code = one.process.poll()
            if code is None:
                continue
            self.running.remove(one)
            self.free += one.gpus
            if code == unwritable.EXIT_CODE:
                self.unwritable = True  # this worker could not record later runs either
            elif code != 0 and not self.stopped:
                self.console.print(
                    f"[red]the worker of job {one.jobs[0].index} ended with exit code {code};[/] "
                    f"its log is {escape(str(self._log(one.jobs)))}",
                    markup=True,
                    highlight=False,
                    soft_wrap=True,
                )

    def _collect(self, tail: RecordTail, bar: Progress, task: TaskID) -> None:
        for record in tail.new():
            if record.submission != self.manifest.id:
                continue
            self.records.append(record)
            bar.advance(task, 1)
            line = _progress_line(record, self.manifest.sweep)
            bar.console.print(line, markup=True, highlight=False, soft_wrap=True)

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
        self.running.clear()


def _stop_signals() -> list[signal.Signals]:
    """Return the signals that stop the queue: SIGINT, SIGTERM and usually SIGHUP.

    SIGHUP is left out if this process ignores it, e.g. because it was started with nohup.
    """
    hangup = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return [signal.SIGINT, signal.SIGTERM, *hangup]


def _leave_terminal() -> None:
    """Redirect stdout and stderr to /dev/null, because writing to a closed terminal fails."""
    for number in (1, 2):
        if stat.S_ISCHR(os.fstat(number).st_mode):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, number)
            os.close(null)


def _progress_line(record: Record, sweep: Sweep) -> str:
    mild = {"ok": "green", "unsupported": "yellow", "oom": "yellow"}
    colour = mild.get(record.status, "red")
    blocks = [(sweep.grid, sweep.zip), *((c.fixed, c.grid, c.zip) for c in sweep.cases)]
    swept = {name for block in blocks for part in block for name in part}
    names = [name for name in record.params if name in swept] or list(record.params)
    what = " ".join(f"{name}={record.params[name]}" for name in names)
    if any(case.benchmark for case in sweep.cases):
        what = f"{record.benchmark} {what}"
    if record.failure is not None:
        first = [*record.failure.message.splitlines(), ""][0]
        what += f": {first[:160] or record.failure.type}"
    took = max(0.0, record.finished_at - record.started_at)
    return f"[{colour}]{record.status:11}[/] {took:6.1f} s  {record.run[:8]}  {escape(what)}"
