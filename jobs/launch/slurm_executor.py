"""Submission of jobs to Slurm through submitit. No other module uses submitit.

Jobs with the same resources, launch settings and time limit are submitted as one job array. If
there are more jobs than the cluster's MaxArraySize allows, they are submitted as several arrays.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import submitit
from submitit.slurm.slurm import SlurmExecutor, SlurmJobEnvironment

from jobs.formatting import counted
from jobs.launch.snapshot import place
from jobs.results.manifest import Job, Manifest, SlurmHandle, read_manifest, write_handles
from jobs.run import Shape
from jobs.worker.fork_server import adopt_orphans
from jobs.worker.isolation import blocked_signals
from jobs.worker.worker import Stopped, Worker

# Time from Slurm's warning signal to the time limit, in seconds. In this time the worker kills the
# current run and writes its record, and submitit requeues the job.
SIGNAL_DELAY_S = 30
SPARE_TIMEOUTS = 10  # number of allowed requeues of a job, in addition to one per run
DEFAULT_MAX_ARRAY = 1001  # Slurm's default for MaxArraySize


class SubmissionError(RuntimeError):
    """Raised if the jobs cannot be submitted to Slurm."""


class WorkerTask:
    """Callable that runs one job. submitit pickles it and calls it inside the allocation.

    Args:
        submission: folder of the submission.
        index: index of the job in the submission's manifest.
    """

    def __init__(self, submission: Path, index: int):
        self.submission, self.index = submission, index
        self.worker: Worker | None = None

    def __call__(self) -> None:
        adopt_orphans()  # those of a fork server that was killed
        node_rank = int(os.environ.get("SLURM_NODEID", 0))
        self.worker = Worker(read_manifest(self.submission), self.index, node_rank=node_rank)
        signal.signal(signal.SIGTERM, self._on_term)
        self.worker.run()

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Prepare the requeue of this job by Slurm. submitit calls this method.

        submitit calls the method on Slurm's warning signal, which arrives shortly before the time
        limit or at a preemption. The method kills the run that is executing and writes its record.
        After the requeue, the new worker skips the runs that are done.

        Returns:
            The submission of a new `WorkerTask`, which runs the job after the requeue.
        """
        if self.worker is not None:
            limit = self.worker.near_limit() and _sigterm_reason() not in ("grace", "preempted")
            self.worker.stop("limit" if limit else "preempted")
        return submitit.helpers.DelayedSubmission(WorkerTask(self.submission, self.index))

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
            raise Stopped(128 + signum)


def _sigterm_reason() -> str:
    """Return why Slurm sent SIGTERM.

    Returns:
        "grace": the job was preempted, but may run until the end of its grace time.
        "preempted": the job was preempted or requeued, and is about to end.
        "step": only the job step is about to end. The job continues.
        "cancelled": any other reason, or scontrol does not answer.
    """
    command = ["scontrol", "show", "job", "-o", SlurmJobEnvironment().job_id]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return "cancelled"
    fields = dict(re.findall(r"(\w+)=(\S+)", done.stdout))
    # A running job has the state SIGNALING while Slurm delivers this signal.
    running = fields.get("JobState") in ("RUNNING", "SIGNALING")
    if fields.get("PreemptTime", "None") != "None":
        return "grace" if running else "preempted"
    if int(fields.get("Restarts", 0)) > int(os.environ.get("SLURM_RESTART_COUNT", 0)):
        return "preempted"
    return "step" if running else "cancelled"


class _Executor(SlurmExecutor):
    """submitit's Slurm executor. It creates sbatch scripts even if Slurm is not installed."""

    @classmethod
    def affinity(cls) -> int:
        return 2

    @classmethod
    def name(cls) -> str:
        return "slurm"


def require_slurm() -> None:
    """Check that Slurm is installed.

    Raises:
        SubmissionError: if sbatch is not on PATH.
    """
    if shutil.which("sbatch") is None:
        raise SubmissionError(
            "Slurm is not installed on this machine (no sbatch on PATH); use --local to run the "
            "jobs on this machine, or --debug to run them in the foreground"
        )


@dataclass(frozen=True)
class Array:
    """Jobs that are submitted as one Slurm job array."""

    jobs: list[Job]
    parallelism: int  # maximum number of jobs of the array that run at the same time
    after: int | None = None  # index of the array that must end first; None: do not wait


def submit(manifest: Manifest) -> None:
    """Submit all jobs of a manifest to Slurm, as one or more job arrays.

    As soon as Slurm has accepted an array, the Slurm ids of its jobs are saved.

    Raises:
        SubmissionError: if Slurm is not installed, if the path of the results folder contains % or
            a backslash, or if sbatch refuses an array. Arrays that sbatch has already
            accepted remain submitted.
        OSError: if the Slurm ids of an array cannot be saved. The array is then cancelled.
    """
    require_slurm()
    if set("%\\") & set(str(manifest.path)):  # Slurm expands patterns such as %j in paths
        raise SubmissionError(
            f"the path of the results folder must not contain % or \\, got {str(manifest.folder)!r}"
        )
    array_ids: list[str] = []
    for array in arrays(manifest, max_array_size()):
        after = array_ids[array.after] if array.after is not None else None
        executor = _executor(manifest, array, after)
        tasks = [WorkerTask(manifest.path, job.index) for job in array.jobs]
        # Jobs whose ids are not saved cannot be found, so a signal must not interrupt this block.
        with clean_environment(place(manifest)[1]), blocked_signals():
            try:
                with executor.batch():
                    submitted = [executor.submit(task) for task in tasks]
            except submitit.core.utils.FailedJobError as error:
                raise SubmissionError(_refusal(array, array_ids, str(error))) from None
            for job, handle in zip(array.jobs, submitted, strict=True):
                manifest.handles[job.index] = SlurmHandle(handle.job_id)
            array_ids.append(submitted[0].job_id.split("_")[0])
            try:
                write_handles(manifest)
            except OSError:  # e.g. a full disk: nothing could find or cancel these jobs
                subprocess.run(["scancel", array_ids[-1]])
                raise


def _refusal(array: Array, before: list[str], words: str) -> str:
    text = (
        f"sbatch refused {counted(len(array.jobs), 'job')} ({array.jobs[0].shape}): {words.strip()}"
    )
    if before:
        text += f"\njob arrays submitted before the refusal stay submitted: {', '.join(before)}"
    return text


def arrays(manifest: Manifest, largest: int) -> list[Array]:
    """Group the jobs of a manifest into job arrays.

    All jobs of an array have the same resources and launch settings (`Shape`) and the same time
    limit. All arrays with the same `Shape` together run at most `slurm.array_parallelism` jobs at
    the same time. Each array gets a part of this maximum, in proportion to its number of jobs. If
    the number of arrays is larger than the maximum, each additional array waits until an earlier
    array has ended.

    Args:
        manifest: manifest of the submission.
        largest: maximum number of jobs in an array.
    """
    by_shape: dict[Shape, dict[int, list[Job]]] = {}
    for job in manifest.jobs:
        by_shape.setdefault(job.shape, {}).setdefault(job.timeout_min, []).append(job)
    result: list[Array] = []
    for by_limit in by_shape.values():
        chunks = [
            jobs[i : i + largest]
            for jobs in by_limit.values()
            for i in range(0, len(jobs), largest)
        ]
        most, first = manifest.sweep.slurm.array_parallelism, len(result)
        for i, (chunk, share) in enumerate(zip(chunks, _shares(chunks, most), strict=True)):
            result.append(Array(chunk, share, first + i - most if i >= most else None))
    return result


def _shares(chunks: list[list[Job]], most: int) -> list[int]:
    """Return, for each job array, how many of its jobs may run at the same time.

    Every array gets at least 1. The rest of `most` is divided roughly in proportion to the numbers
    of jobs. The sum of the results is at most the total number of jobs.

    Args:
        chunks: the jobs of each array.
        most: maximum number of jobs that run at the same time, in all arrays together. If there are
            more arrays than this, the sum exceeds the maximum, and the caller must let some arrays
            wait.
    """
    shares = [1] * len(chunks)
    for _ in range(min(most, sum(map(len, chunks))) - len(chunks)):
        i = max(range(len(chunks)), key=lambda i: len(chunks[i]) / shares[i])
        shares[i] += 1
    return shares


def sbatch_texts(manifest: Manifest) -> Iterator[str]:
    """Yield the sbatch script of each array, as submitit would submit it."""
    for array in arrays(manifest, max_array_size()):
        executor = _executor(manifest, array, None if array.after is None else "<the array before>")
        if len(array.jobs) > 1:
            executor.parameters["map_count"] = len(array.jobs)
        yield executor._make_submission_file_text(executor._submitit_command_str, "dry-run")


def _executor(manifest: Manifest, array: Array, after: str | None) -> _Executor:
    slurm, job = manifest.sweep.slurm, array.jobs[0]
    shape = job.shape
    # submitit requeues a job at most `max_num_timeout` times. Before each time limit, at least one
    # run ends or times out. One requeue per run is therefore enough for time limits. SPARE_TIMEOUTS
    # is for preemptions, which submitit counts as timeouts in short jobs. The number is finite, so
    # that a job in which no run ever starts is not requeued forever.
    timeouts = max(len(job.tasks) for job in array.jobs) + SPARE_TIMEOUTS
    executor = _Executor(manifest.path / "slurm", max_num_timeout=timeouts)
    # Since Slurm 22.05, srun does not inherit --cpus-per-task from sbatch.
    cpus = [f"--cpus-per-task={shape.cpus_per_task}"] if shape.cpus_per_task else []
    # The copy of the current folder, if the jobs run from a snapshot. None is left out below.
    cwd = manifest.snapshot and manifest.snapshot.cwd
    additional = {"requeue": True, "chdir": cwd, **slurm.additional_parameters}
    wanted: dict[str, Any] = {
        "job_name": manifest.sweep.name,
        "time": job.timeout_min,
        "nodes": shape.nodes,
        "ntasks_per_node": 1,
        "gpus_per_node": shape.gpus_per_node or None,
        "cpus_per_task": shape.cpus_per_task,
        "mem": f"{int(shape.mem_gb * 1024)}MB" if shape.mem_gb else None,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "exclude": slurm.exclude,
        "dependency": f"afterany:{after}" if after else None,
        # Slurm may send the warning signal 30 s early. For a short job, use a smaller value, so
        # that the signal does not arrive before the worker has started.
        "signal_delay_s": min(SIGNAL_DELAY_S, 15 * job.timeout_min),
        "array_parallelism": array.parallelism,
        "setup": [_checked(line) for line in slurm.setup] or None,
        # If a worker dies, end the job on all nodes. Otherwise the other nodes would wait until the
        # time limit.
        "srun_args": ["--kill-on-bad-exit=1", *cpus, *slurm.srun_args],
        "additional_parameters": {k: v for k, v in additional.items() if v not in (None, False)},
    }
    executor.update_parameters(**{k: v for k, v in wanted.items() if v is not None})
    return executor


def _checked(line: str) -> str:
    """Return shell code that runs one line of the sweep's `slurm.setup` commands.

    If the line fails, the shell code prints an error and ends the job.
    """
    message = shlex.quote(f"setup failed: {line}")
    return f"{{ :\n{line}\n}} || {{ echo {message} >&2; exit 1; }}"


def max_array_size() -> int:
    """Return the cluster's MaxArraySize, which is the largest allowed array index plus 1.

    If scontrol is missing or does not answer, return Slurm's default.
    """
    try:
        done = subprocess.run(
            ["scontrol", "show", "config"], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return DEFAULT_MAX_ARRAY
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", done.stdout, re.MULTILINE)
    return max(1, int(found[1])) if found else DEFAULT_MAX_ARRAY  # size 0 disables arrays


@contextmanager
def clean_environment(after: dict[str, str]) -> Iterator[None]:
    """Replace os.environ by the environment of a job while the `with` block runs.

    Args:
        after: environment of the job, without the variables of a surrounding Slurm allocation or
            torchrun. Its PYTHONPATH makes this project importable.
    """
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(after)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
