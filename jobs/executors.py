"""Submission to Slurm through submitit: the only file that names it.

A group of jobs of one shape and limit becomes an array, or several where the cluster's
MaxArraySize is smaller.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import submitit
from submitit.slurm.slurm import SlurmExecutor

from jobs.isolation import job_environment
from jobs.manifest import Job, Manifest, read_manifest, write_handles
from jobs.worker import DEATHS, Worker

SIGNAL_DELAY_S = 30  # between Slurm's warning and the time limit: to kill a run, record, requeue
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
        self.worker.handle_term()
        self.worker.run()

    def checkpoint(self) -> submitit.helpers.DelayedSubmission:
        """Called on Slurm's warning, at the time limit or on preemption: record, then requeue.

        The same job again: its worker skips what has a record.
        """
        if self.worker is not None:
            self.worker.stop("limit" if self.worker.near_limit() else "preempted")
        return submitit.helpers.DelayedSubmission(WorkerTask(self.submission, self.index))


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


def submit(manifest: Manifest, progress: Callable[[int], None] | None = None) -> None:
    """Submit every job of a manifest; Slurm's ids are written down array by array.

    Raises:
        SubmissionError: what sbatch said. What was submitted before stays, with its ids.
    """
    require_slurm()
    with clean_environment():
        for jobs, parallelism in arrays(manifest, max_array_size()):
            executor = _executor(manifest, jobs[0], parallelism)
            tasks = [WorkerTask(manifest.path, job.index) for job in jobs]
            try:
                with executor.batch():
                    submitted = [executor.submit(task) for task in tasks]
            except (
                submitit.core.utils.FailedJobError,
                submitit.core.utils.FailedSubmissionError,
            ) as error:
                raise SubmissionError(
                    f"sbatch refused {len(jobs)} jobs ({jobs[0].shape}): {error}"
                ) from None
            for job, handle in zip(jobs, submitted, strict=True):
                manifest.handles[job.index] = {"slurm": handle.job_id}
            write_handles(manifest)
            if progress is not None:
                progress(len(jobs))


def arrays(manifest: Manifest, largest: int) -> list[tuple[list[Job], int]]:
    """Jobs as arrays of one shape and limit, none larger than `largest`, each with its parallelism.

    The chunks of a group that had to be split share its array_parallelism.
    """
    groups: dict[Any, list[Job]] = {}
    for job in manifest.jobs:
        groups.setdefault((job.shape, job.timeout_min), []).append(job)
    result = []
    for jobs in groups.values():
        chunks = [jobs[i : i + largest] for i in range(0, len(jobs), largest)]
        share = max(1, manifest.sweep.slurm.array_parallelism // len(chunks))
        result += [(chunk, share) for chunk in chunks]
    return result


def sbatch_texts(manifest: Manifest) -> Iterator[str]:
    """The sbatch script of each array, as submitit would submit it."""
    for jobs, parallelism in arrays(manifest, max_array_size()):
        executor = _executor(manifest, jobs[0], parallelism)
        if len(jobs) > 1:
            executor.parameters["map_count"] = len(jobs)
        yield executor._make_submission_file_text(executor._submitit_command_str, "dry-run")


def _executor(manifest: Manifest, job: Job, parallelism: int) -> _Executor:
    slurm, shape = manifest.sweep.slurm, job.shape
    # A run ends the allocation at most once as its first, plus the workers that it may take down.
    executor = _Executor(manifest.path / "slurm", max_num_timeout=len(job.tasks) + DEATHS)
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
        "signal_delay_s": SIGNAL_DELAY_S,
        "array_parallelism": parallelism,
        "setup": [_checked(line) for line in slurm.setup] or None,
        # A worker that dies must end the job on the other nodes too, or they wait to the limit.
        "srun_args": ["--kill-on-bad-exit=1", *slurm.srun_args],
        "additional_parameters": {"requeue": True, **slurm.additional_parameters},
    }
    executor.update_parameters(**{k: v for k, v in wanted.items() if v is not None})
    return executor


def _checked(line: str) -> str:
    """A setup line that ends the job if it fails; sbatch would go on without it."""
    return f"{{\n{line}\n}} || {{ echo 'the setup line above failed' >&2; exit 1; }}"


def max_array_size() -> int:
    """The cluster's MaxArraySize: the largest index of an array, plus one."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "config"], capture_output=True, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return DEFAULT_MAX_ARRAY
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", done.stdout, re.MULTILINE)
    return int(found[1]) if found else DEFAULT_MAX_ARRAY


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
