"""Submission of jobs to Slurm through submitit. No other module uses submitit.

Jobs with the same resources, launch settings and time limit are submitted as one job array. If
there are more jobs than the cluster's MaxArraySize allows, they are submitted as several arrays.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import submitit
from submitit.slurm.slurm import SlurmExecutor

from jobs.errors import CommandError
from jobs.formatting import counted, on_one_line
from jobs.launch.sbatch_setup import checked, restarting_srun
from jobs.launch.snapshot import place
from jobs.launch.worker_task import WorkerTask, signal_delay_s
from jobs.results.manifest import Job, Manifest, SlurmHandle, write_handles
from jobs.results.slurm_job_states import REFUSAL
from jobs.run import Shape
from jobs.slurm_client import SlurmSilent, slurm_client
from jobs.sweep.schema import Slurm
from jobs.worker.isolation import blocked_signals

SPARE_TIMEOUTS = 10  # number of allowed requeues of a job, in addition to one per run
DEFAULT_MAX_ARRAY = 1001  # Slurm's default for MaxArraySize


class SubmissionError(CommandError):
    """Raised if the jobs cannot be submitted to Slurm."""


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


INSTEAD = "nothing was submitted; --local runs the jobs on this machine, without Slurm"


@dataclass(frozen=True)
class Array:
    """Jobs that are submitted as one Slurm job array."""

    jobs: list[Job]
    parallelism: int  # maximum number of jobs of the array that run at the same time
    after: int | None = None  # index of the array that must end first; None: do not wait


def submit(manifest: Manifest, largest: int, refresh: Callable[[], None]) -> None:
    """Submit all jobs of a manifest to Slurm, as one or more job arrays.

    As soon as Slurm has accepted an array, the Slurm ids of its jobs are saved. If Slurm refuses an
    array, its reason is saved for `jobs status`.

    Args:
        largest: maximum number of jobs in an array.
        refresh: function that is called before each call of sbatch.

    Raises:
        SubmissionError: if the path of the results folder contains % or a backslash, or if sbatch
            refuses an array. Arrays that sbatch has already accepted remain submitted.
        OSError: if the Slurm ids of an array cannot be saved. The array is then cancelled.
    """
    if set("%\\") & set(str(manifest.path)):  # Slurm expands patterns such as %j in paths
        raise SubmissionError(
            f"the path of the results folder must not contain % or \\, got {str(manifest.folder)!r}"
        )
    array_ids: list[str] = []
    for array in arrays(manifest, largest):
        refresh()
        after = array_ids[array.after] if array.after is not None else None
        executor = _executor(manifest, array, after)
        cwd = _cwd(manifest)
        tasks = [WorkerTask(manifest.path, job.index, cwd) for job in array.jobs]
        # Jobs whose ids are not saved cannot be found, so a signal must not interrupt this block.
        with clean_environment(place(manifest)[1]), blocked_signals():
            try:
                # submitit prints the reason of a refusal, which is also part of the exception.
                with contextlib.redirect_stderr(io.StringIO()), executor.batch():
                    submitted = [executor.submit(task) for task in tasks]
            except submitit.core.utils.FailedJobError as error:
                (manifest.path / REFUSAL).write_text(f"{error}\n", "utf-8", "replace")
                why = _refusal(array, array_ids, str(error), manifest.sweep.slurm)
                raise SubmissionError(why) from None
            for job, handle in zip(array.jobs, submitted, strict=True):
                manifest.handles[job.index] = SlurmHandle(handle.job_id)
            array_ids.append(submitted[0].job_id.split("_")[0])
            try:
                write_handles(manifest)
            except OSError:  # e.g. a full disk: nothing could find or cancel these jobs
                with suppress(SlurmSilent):
                    slurm_client("scancel", array_ids[-1])
                raise


def _refusal(array: Array, before: list[str], words: str, slurm: Slurm) -> str:
    text = (
        f"sbatch refused {counted(len(array.jobs), 'job')} ({array.jobs[0].shape}): {words.strip()}"
    )
    named = ("partition", "account", "qos", "constraint", "exclude")
    given = {name: getattr(slurm, name) for name in named if getattr(slurm, name) is not None}
    if given:
        options = ", ".join(f"slurm.{name}={value}" for name, value in given.items())
        text += f"\nthe sweep, cluster.yaml or the command line set {options}"
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
    of jobs. The sum of the results is at most the total number of jobs. If there are more arrays
    than `most`, the sum exceeds `most`, and the caller must let some arrays wait.
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
    folder = manifest.path / "slurm"
    executor = _Executor(folder, max_num_timeout=timeouts, python=slurm.python)
    # Since Slurm 22.05, srun does not inherit --cpus-per-task from sbatch.
    cpus = [f"--cpus-per-task={shape.cpus_per_task}"] if shape.cpus_per_task else []
    # The copy of the current folder, if the jobs run from a snapshot. None is left out below.
    cwd = manifest.snapshot and manifest.snapshot.cwd
    exclusive = {"exclusive": True} if shape.exclusive else {}
    additional = {"requeue": True, "chdir": cwd, **exclusive, **slurm.additional_parameters}
    wanted: dict[str, Any] = {
        "job_name": manifest.sweep.name,
        "time": job.timeout_min,
        "nodes": shape.nodes,
        "ntasks_per_node": 1,
        "gpus_per_node": _gpus(shape),
        "cpus_per_task": shape.cpus_per_task,
        # Slurm gives a job with --mem=0 all the memory of its nodes.
        "mem": f"{max(1, int(shape.mem_gb * 1024))}MB" if shape.mem_gb else None,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "constraint": slurm.constraint,
        "exclude": slurm.exclude,
        "dependency": f"afterany:{after}" if after else None,
        # Slurm may send the warning signal 30 s early. For a short job, use a smaller value, so
        # that the signal does not arrive before the worker has started.
        "signal_delay_s": signal_delay_s(job.timeout_min),
        "array_parallelism": array.parallelism,
        # The function srun comes last, so that commands of the user call the program srun.
        "setup": [*map(checked, slurm.setup), restarting_srun(manifest, array.jobs)],
        # If a worker dies, end the job on all nodes. Otherwise the other nodes would wait until the
        # time limit.
        "srun_args": ["--kill-on-bad-exit=1", *cpus, *slurm.srun_args],
        "additional_parameters": {k: v for k, v in additional.items() if v not in (None, False)},
    }
    executor.update_parameters(**{k: v for k, v in wanted.items() if v is not None})
    return executor


def _cwd(manifest: Manifest) -> str:
    """Return the current folder of the jobs."""
    given = manifest.sweep.slurm.additional_parameters.get("chdir")
    return str(given or (manifest.snapshot.cwd if manifest.snapshot else os.getcwd()))


def _gpus(shape: Shape) -> str | None:
    """Return the value of --gpus-per-node: `2`, or `h100:2` with a type of GPU."""
    kind = f"{shape.gpu_type}:" if shape.gpu_type else ""
    return f"{kind}{shape.gpus_per_node}" if shape.gpus_per_node else None


def require_controller() -> int:
    """Check that Slurm's controller answers, and return the cluster's MaxArraySize.

    MaxArraySize is the largest allowed index of a job array plus 1. sbatch must not be ended by a
    time limit, because it may already have submitted a job. This check therefore comes first.

    Raises:
        SubmissionError: if Slurm does not answer.
    """
    try:
        done = slurm_client("scontrol", "show", "config")
    except SlurmSilent as error:
        raise SubmissionError(f"{error}; {INSTEAD}") from None
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", done.stdout, re.MULTILINE)
    if found is None and done.returncode:
        why = on_one_line(done.stderr)
        raise SubmissionError(
            f"Slurm does not answer: 'scontrol show config' failed: {why}; {INSTEAD}"
        )
    return max(1, int(found[1])) if found else DEFAULT_MAX_ARRAY  # size 0 disables arrays


def max_array_size() -> int:
    """Return the cluster's MaxArraySize, or Slurm's default if Slurm does not answer."""
    try:
        return require_controller()
    except SubmissionError:
        return DEFAULT_MAX_ARRAY


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
