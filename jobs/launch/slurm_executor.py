"""Submission of jobs to Slurm. submitit writes the sbatch scripts; no other module uses it.

Jobs with the same `Shape` are submitted as one job array. If there are more jobs than the cluster's
MaxArraySize allows, they are submitted as several arrays.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from jobs.errors import CommandError
from jobs.formatting import counted
from jobs.launch.sbatch import sbatch
from jobs.launch.signals import noted_signals
from jobs.launch.snapshot import surroundings
from jobs.printing import waiting_for
from jobs.results.manifest import Job, Manifest, write_handles
from jobs.results.slurm_job import SlurmJob, token_of
from jobs.results.slurm_job_states import REFUSAL, STEP_AGAIN
from jobs.results.slurm_queue import Answer, ask
from jobs.results.worker_state import IDLE_RESTARTS, STATE
from jobs.slurm_client import SlurmSilent, configuration
from jobs.sweep.resources import Slurm
from jobs.whole_files import whole_file

DEFAULT_MAX_ARRAY = 1001  # Slurm's default for MaxArraySize
_OPTIONS = ("partition", "account", "qos", "constraint", "exclude")  # as in the sweep
LATE_S = 5.0  # time in which Slurm may still accept jobs after sbatch has failed, in seconds
INDEX = '"$sweep_job"'  # the index of the job in its manifest, in an sbatch script
_SRUN = """\
indices=({indices})
sweep_job=${{indices[${{SLURM_ARRAY_TASK_ID:-0}}]}}
# Start the worker again if a signal such as SIGKILL or SIGSEGV ended it. The new worker continues
# with the other runs. A run during which two workers died is recorded as killed and not repeated.
# A worker that dies before it begins a run is restarted {idle_restarts} times in a row.
srun() {{
  local idle=0 code=0 before
  local state={folder}/$sweep_job/{state}
  while :; do
    before=$(cat "$state" 2>/dev/null || :)
    command srun "$@" && return 0 || code=$?
    case $code in
      132 | 134 | 135 | 136 | 137 | 139) ;;
      *) return "$code" ;;
    esac
    if [ "$before" != "$(cat "$state" 2>/dev/null || :)" ]; then idle=0; else idle=$((idle + 1)); fi
    if [ "$idle" -gt {idle_restarts} ]; then return "$code"; fi
    echo "a worker of the job died (exit code $code); {again}" >&2
  done
}}"""


def require_slurm(results: Path) -> None:
    """Check that Slurm is installed, and accepts the path of a results folder."""
    if set("%\\\n") & set(str(results)):  # Slurm expands patterns such as %j in paths
        raise CommandError(
            f"the path of the results folder must be a line without % and \\, got {str(results)!r}"
        )
    if shutil.which("sbatch") is None:
        raise CommandError(
            "Slurm is not installed on this machine (no sbatch on PATH); use --local to run the "
            "jobs on this machine, or --debug to run them in the foreground"
        )


def submit(manifest: Manifest, digest: str, cluster: str, largest: int) -> None:
    """Submit all jobs of a manifest to Slurm, as one or more job arrays.

    Before each call of sbatch, the jobs are saved with their token. So `jobs status` finds them
    even if this process dies, or if sbatch fails although Slurm has accepted them.

    Args:
        digest: hash of the manifest's file. The jobs refuse another manifest.
        cluster: name of the cluster, and `largest` its limit, from `cluster_of`.

    Raises:
        CommandError, KeyboardInterrupt: Arrays that Slurm has accepted remain submitted.
        OSError: if the jobs of an array cannot be saved. It is not submitted then.
    """
    (manifest.path / "slurm").mkdir(0o755, exist_ok=True)
    _, environment = surroundings(manifest)
    numbers: list[str] = []
    for place, jobs in enumerate(arrays(manifest, largest)):
        script = _script(manifest, jobs, place, digest)
        with whole_file(manifest.path / "slurm" / f"{place}_submission.sh") as file:
            file.write(script.encode(errors="surrogateescape"))
        planned = _planned(manifest, jobs, place, cluster)
        _note(manifest, planned)
        with noted_signals() as noted:
            answer = sbatch(script, environment)
            if answer.number is not None:
                _note(manifest, planned, answer.number)
        number = answer.number
        if number is None:
            known = _asked(planned, 0.0 if answer.refused else LATE_S)
            if known.found is None:
                refused = answer.refused and not known.unknown
                words = answer.words or "sbatch printed nothing"
                raise CommandError(_failed(manifest, jobs, planned, words, refused, numbers))
            number = str(known.found.number)
            _note(manifest, planned, number)
        numbers.append(number)
        if noted:
            raise KeyboardInterrupt


def _planned(manifest: Manifest, jobs: list[Job], place: int, cluster: str) -> dict[int, SlurmJob]:
    """Return the jobs of an array before they have a number, by job index."""
    named = manifest.sweep.slurm.additional_parameters.get("job_name", manifest.sweep.name)
    several = len(jobs) > 1
    return {
        job.index: SlurmJob(
            id=None,
            token=token_of(manifest.id, place),
            element=element if several else None,
            cluster=cluster,
            user=os.getuid(),
            name=str(named),
            since=time.time(),
        )
        for element, job in enumerate(jobs)
    }


def _note(manifest: Manifest, planned: dict[int, SlurmJob], number: str | None = None) -> None:
    """Save the jobs of an array, with its number if Slurm has told it."""
    for index, job in planned.items():
        manifest.handles[index] = job if number is None else job.with_number(number)
    write_handles(manifest)


def _asked(planned: dict[int, SlurmJob], seconds: float) -> Answer:
    """Return what Slurm says about the first job of an array, which it may still accept."""
    job = replace(next(iter(planned.values())), since=0.0)
    deadline = time.monotonic() + seconds
    with waiting_for("Slurm to say whether it has accepted the jobs"):
        while True:
            answer = ask([job])[job]
            if answer.found is not None or time.monotonic() > deadline:
                return answer
            time.sleep(0.5)


def _failed(
    manifest: Manifest,
    jobs: list[Job],
    planned: dict[int, SlurmJob],
    words: str,
    refused: bool,
    before: list[str],
) -> str:
    """Note that sbatch failed, and return the message. Jobs that are not `refused` stay noted."""
    what = f"{counted(len(jobs), 'job')} ({jobs[0].shape}): {words}"
    slurm = manifest.sweep.slurm
    if refused:
        for index in planned:
            del manifest.handles[index]
        write_handles(manifest)
        (manifest.path / REFUSAL).write_text(f"{words}\n", "utf-8", "replace")
        text = f"sbatch refused {what}"
    else:
        now = time.time()
        _note(manifest, {i: replace(job, since=now) for i, job in planned.items()})
        text = (
            f"sbatch did not say whether Slurm has accepted {what}\nwhen Slurm answers again, "
            f"`python -m jobs status` finds them in {manifest.folder}; then repeat the command"
        )
    options = {f"slurm.{name}": getattr(slurm, name) for name in _OPTIONS}
    more = slurm.additional_parameters.items()
    options |= {f"slurm.additional_parameters.{name}": value for name, value in more}
    given = [f"{name}={value}" for name, value in options.items() if value is not None]
    text += f"\nthe time limit is {jobs[0].timeout_min} min (see resources.timeout_min)"
    if given:
        text += f"; the sweep, the cluster file or the command line set {', '.join(given)}"
    if before:
        text += f"\njob arrays submitted before stay submitted: {', '.join(before)}"
    return text


def arrays(manifest: Manifest, largest: int) -> list[list[Job]]:
    """Group the jobs of a manifest into arrays of at most `largest` jobs of the same `Shape`."""
    by_shape = [list(jobs) for _, jobs in groupby(manifest.jobs, lambda job: job.shape)]
    return [jobs[i : i + largest] for jobs in by_shape for i in range(0, len(jobs), largest)]


def planned_arrays(manifest: Manifest) -> tuple[list[list[Job]], str]:
    """Return the job arrays of a submission that is not started.

    If Slurm does not answer, its default limit is used, and the second value is the reason.
    """
    try:
        return arrays(manifest, cluster_of(manifest.sweep.slurm)[1]), ""
    except SlurmSilent as error:
        return arrays(manifest, DEFAULT_MAX_ARRAY), str(error)


def sbatch_texts(manifest: Manifest) -> Iterator[str]:
    """Yield the script of each array, as it would be given to sbatch."""
    for place, jobs in enumerate(planned_arrays(manifest)[0]):
        yield _script(manifest, jobs, place, "<hash of the manifest>")


def _script(manifest: Manifest, jobs: list[Job], place: int, digest: str) -> str:
    """Return the sbatch script of an array of jobs, which have the same `Shape` and time limit."""
    # Takes longer than planning a submission. The public functions of submitit also submit.
    from submitit.slurm.slurm import _make_sbatch_string

    from jobs.launch.worker_task import signal_delay_s  # imports the worker

    slurm, job = manifest.sweep.slurm, jobs[0]
    shape = job.shape
    kind = f"{shape.gpu_type}:" if shape.gpu_type else ""
    # Since Slurm 22.05, srun does not inherit --cpus-per-task from sbatch.
    cpus = [f"--cpus-per-task={shape.cpus_per_task}"] if shape.cpus_per_task else []
    cwd, environment = surroundings(manifest)
    own = slurm.additional_parameters
    always = {"requeue": not own.get("no_requeue"), "chdir": cwd, "exclusive": shape.exclusive}
    additional = {**always, **own}
    comment = [additional.get("comment"), token_of(manifest.id, place)]
    additional["comment"] = " ".join(str(part) for part in comment if part)
    given: dict[str, Any] = {
        "job_name": manifest.sweep.name,
        "time": job.timeout_min,
        "nodes": shape.nodes,
        "ntasks_per_node": 1,
        "gpus_per_node": f"{kind}{shape.gpus_per_node}" if shape.gpus_per_node else None,
        "cpus_per_task": shape.cpus_per_task,
        # Slurm gives a job with --mem=0 all the memory of its nodes.
        "mem": f"{int(shape.mem_gb * 1024)}MB" if shape.mem_gb else None,
        **{name: getattr(slurm, name) for name in _OPTIONS},
        # Slurm may send the warning signal a minute early. In a short job it is to come later, so
        # that its worker has started.
        "signal_delay_s": signal_delay_s(job.timeout_min),
        "map_count": len(jobs) if len(jobs) > 1 else None,
        "array_parallelism": slurm.array_parallelism,
        # The exports are for sites with `sbatch --export=NONE`. The function srun comes last, so
        # that commands of the user call the program srun.
        "setup": [
            f"export PYTHONPATH={shlex.quote(environment['PYTHONPATH'])}",
            f"export CUDA_DEVICE_ORDER={shlex.quote(environment['CUDA_DEVICE_ORDER'])}",
            *map(checked, slurm.setup),
            restarting_srun(manifest, jobs),
        ],
        # If a worker dies, end the job on all nodes. Otherwise the other nodes would wait until the
        # time limit.
        "srun_args": ["--kill-on-bad-exit=1", "--export=ALL", *cpus, *slurm.srun_args],
        # 0 is a value, although it equals False.
        "additional_parameters": {
            k: v for k, v in additional.items() if v is not None and v is not False
        },
        "wckey": None,  # some sites refuse unknown keys
    }
    task = [str(manifest.path), digest, str(additional["chdir"] or cwd or os.getcwd())]
    python = slurm.python or shlex.quote(sys.executable)
    worker = f"{python} -u -m jobs.launch.worker_task {INDEX} {shlex.join(task)}"
    return _make_sbatch_string(worker, manifest.path / "slurm", **given)


def restarting_srun(manifest: Manifest, jobs: list[Job]) -> str:
    """Return shell code for `INDEX`, and a function `srun` that repeats srun if a worker dies.

    The worker's file state.json changes with each run that it begins, and a run kills at most two
    workers, so the number of restarts is bounded. `jobs` are those of an array, in its order.
    """
    return _SRUN.format(
        idle_restarts=IDLE_RESTARTS,
        indices=" ".join(str(job.index) for job in jobs),
        folder=shlex.quote(str(manifest.job_folder(0).parent)),
        state=STATE,
        again=STEP_AGAIN,
    )


def checked(line: str) -> str:
    """Return shell code that runs a line of `slurm.setup` and ends the job if it fails."""
    message = shlex.quote(f"setup failed: {line}")
    return f"{{ :\n{line}\n}} || {{ echo {message} >&2; exit 1; }}"


def cluster_of(slurm: Slurm) -> tuple[str, int]:
    """Return the cluster to which jobs go, and its largest array. Raises SlurmSilent."""
    wanted = str(slurm.additional_parameters.get("clusters", "")).lower()  # as Slurm does
    found = configuration(wanted)
    size = found.get("MaxArraySize", "")
    largest = max(1, int(size)) if size.isdigit() else DEFAULT_MAX_ARRAY  # 0 disables arrays
    return wanted or found.get("ClusterName", ""), largest
