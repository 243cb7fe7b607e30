"""Submission to Slurm through submitit: the only file that names it.

Jobs of one shape and limit become an array, or several where the cluster's MaxArraySize is smaller.
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

from jobs.results.manifest import Job, Manifest, SlurmHandle, read_manifest, write_handles
from jobs.run import Shape
from jobs.worker.environment import job_environment
from jobs.worker.isolation import blocked_signals
from jobs.worker.worker import Stopped, Worker

SIGNAL_DELAY_S = 30  # at least, from Slurm's warning to the time limit: to kill, record, requeue
SPARE_TIMEOUTS = 10
DEFAULT_MAX_ARRAY = 1001


class SubmissionError(RuntimeError):
    """Slurm is not here, or refused the jobs."""


class WorkerTask:
    """What submitit pickles: a job of a submission, run by its worker, resumed when requeued."""

    def __init__(self, submission: Path, index: int):
        self.submission, self.index = submission, index
        self.worker: Worker | None = None

    def __call__(self) -> None:
        node_rank = int(os.environ.get("SLURM_NODEID", 0))
        self.worker = Worker(read_manifest(self.submission), self.index, node_rank=node_rank)
        signal.signal(signal.SIGTERM, self._on_term)
        self.worker.run()

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Called on Slurm's warning, at the time limit or on preemption: record, then requeue.

        The same job again: its worker skips what has a record.
        """
        if self.worker is not None:
            limit = self.worker.near_limit() and _sigterm_reason() not in ("grace", "preempted")
            self.worker.stop("limit" if limit else "preempted")
        return submitit.helpers.DelayedSubmission(WorkerTask(self.submission, self.index))

    def _on_term(self, signum: int, frame: FrameType | None) -> None:
        """Record what is running and leave, unless node 0's worker has something better to do."""
        assert self.worker is not None
        leads, nodes = self.worker.node_rank == 0, self.worker.job.shape.nodes
        why = _sigterm_reason()
        if why == "grace":
            # Slurm would take the end of the job now for a failure. As on its warning, then: node
            # 0's worker records and requeues, and the others wait for that.
            if leads:
                os.kill(os.getpid(), signal.SIGUSR2)
        elif why == "step" and leads and nodes > 1:
            pass  # srun, because another node's worker is gone: this one sees that and records it
        else:
            self.worker.stop("preempted" if why == "preempted" else "cancelled")
            raise Stopped(128 + signum)


def _sigterm_reason() -> str:
    """Why Slurm sends SIGTERM: `grace`, this job is preempted but may run on for a while;
    `preempted`, or requeued, and about to end; `step`, not the job; else `cancelled`."""
    command = ["scontrol", "show", "job", "-o", SlurmJobEnvironment().job_id]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return "cancelled"
    fields = dict(re.findall(r"(\w+)=(\S+)", done.stdout))
    # SIGNALING is what a running job is called while Slurm delivers this very signal.
    running = fields.get("JobState") in ("RUNNING", "SIGNALING")
    if fields.get("PreemptTime", "None") != "None":
        return "grace" if running else "preempted"
    if int(fields.get("Restarts", 0)) > int(os.environ.get("SLURM_RESTART_COUNT", 0)):
        return "preempted"
    return "step" if running else "cancelled"


class _Executor(SlurmExecutor):
    """submitit's, for the sbatch text of a dry run too where Slurm is not installed."""

    @classmethod
    def affinity(cls) -> int:
        return 2

    @classmethod
    def name(cls) -> str:
        return "slurm"


def require_slurm() -> None:
    """Raise unless sbatch is here."""
    if shutil.which("sbatch") is None:
        raise SubmissionError(
            "Slurm is not installed here (no sbatch on PATH). Add --local to run on this machine, "
            "or --debug to run in the foreground"
        )


@dataclass(frozen=True)
class Array:
    """Jobs that are submitted together."""

    jobs: list[Job]
    parallelism: int
    after: int | None = None  # index of the array that has to end first


def submit(manifest: Manifest) -> None:
    """Submit every job of a manifest; Slurm's ids are written down array by array.

    Raises:
        SubmissionError: what sbatch said. What was submitted before stays, with its ids.
    """
    require_slurm()
    if set("%\\") & set(str(manifest.path)):  # Slurm puts job ids where it sees %j in a path
        raise SubmissionError(f"Slurm cannot write below {manifest.folder}: its path has % or \\")
    array_ids: list[str] = []
    for array in arrays(manifest, max_array_size()):
        after = array_ids[array.after] if array.after is not None else None
        executor = _executor(manifest, array, after)
        tasks = [WorkerTask(manifest.path, job.index) for job in array.jobs]
        # An interrupt between sbatch and the note of its ids would leave jobs that nobody knows.
        with clean_environment(), blocked_signals():
            try:
                with executor.batch():
                    submitted = [executor.submit(task) for task in tasks]
            except submitit.core.utils.FailedJobError as error:
                raise SubmissionError(_refusal(array, array_ids, str(error))) from None
            for job, handle in zip(array.jobs, submitted, strict=True):
                manifest.handles[job.index] = SlurmHandle(handle.job_id)
            write_handles(manifest)
        array_ids.append(submitted[0].job_id.split("_")[0])


def _refusal(array: Array, before: list[str], words: str) -> str:
    text = f"sbatch refused {len(array.jobs)} jobs ({array.jobs[0].shape}): {words.strip()}"
    if before:
        text += f"\nsubmitted before that, and still there: {', '.join(before)}"
    return text


def arrays(manifest: Manifest, largest: int) -> list[Array]:
    """Jobs as arrays of one shape and limit, none larger than `largest`.

    All arrays of a shape together run no more than array_parallelism jobs at once: they share it
    by their sizes, and where there are more arrays than that, the later wait for the earlier.
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
    """At least 1 each, the rest one by one to whichever has most jobs for each it may run."""
    shares = [1] * len(chunks)
    for _ in range(min(most, sum(map(len, chunks))) - len(chunks)):
        i = max(range(len(chunks)), key=lambda i: len(chunks[i]) / shares[i])
        shares[i] += 1
    return shares


def sbatch_texts(manifest: Manifest) -> Iterator[str]:
    """The sbatch script of each array, as submitit would submit it."""
    for array in arrays(manifest, max_array_size()):
        executor = _executor(manifest, array, None if array.after is None else "<the array before>")
        if len(array.jobs) > 1:
            executor.parameters["map_count"] = len(array.jobs)
        yield executor._make_submission_file_text(executor._submitit_command_str, "dry-run")


def _executor(manifest: Manifest, array: Array, after: str | None) -> _Executor:
    slurm, job = manifest.sweep.slurm, array.jobs[0]
    shape = job.shape
    # Each time the limit comes a run is done or given up. In a short job submitit counts preemption
    # as that too, and a job in which no run gets to start must not come back for ever.
    timeouts = max(len(job.tasks) for job in array.jobs) + SPARE_TIMEOUTS
    executor = _Executor(manifest.path / "slurm", max_num_timeout=timeouts)
    # Since Slurm 22.05 srun does not take it over from sbatch.
    cpus = [f"--cpus-per-task={shape.cpus_per_task}"] if shape.cpus_per_task else []
    additional = {"requeue": True, **slurm.additional_parameters}
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
        # It comes up to 30 s early, and must not meet a worker that has not even started.
        "signal_delay_s": min(SIGNAL_DELAY_S, 15 * job.timeout_min),
        "array_parallelism": array.parallelism,
        "setup": [_checked(line) for line in slurm.setup] or None,
        # A worker that dies must end the job on the other nodes too, or they wait to the limit.
        "srun_args": ["--kill-on-bad-exit=1", *cpus, *slurm.srun_args],
        "additional_parameters": {k: v for k, v in additional.items() if v not in (None, False)},
    }
    executor.update_parameters(**{k: v for k, v in wanted.items() if v is not None})
    return executor


def _checked(line: str) -> str:
    """A setup line that ends the job if it fails; sbatch would go on without it."""
    message = shlex.quote(f"setup failed: {line}")
    return f"{{ :\n{line}\n}} || {{ echo {message} >&2; exit 1; }}"


def max_array_size() -> int:
    """The cluster's MaxArraySize: the largest index of an array, plus one."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "config"], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return DEFAULT_MAX_ARRAY
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", done.stdout, re.MULTILINE)
    return max(1, int(found[1])) if found else DEFAULT_MAX_ARRAY  # 0: no arrays at all


@contextmanager
def clean_environment() -> Iterator[None]:
    """os.environ without what a surrounding allocation left, and with this project importable."""
    before = dict(os.environ)
    after = job_environment()
    os.environ.clear()
    os.environ.update(after)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
