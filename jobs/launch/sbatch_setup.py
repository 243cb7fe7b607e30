"""Shell code of sbatch scripts: the user's setup commands, and restarts of workers that died."""

from __future__ import annotations

import shlex

from jobs.results.manifest import Job, Manifest
from jobs.results.slurm_job_states import STEP_AGAIN
from jobs.results.worker_state import IDLE_RESTARTS, STATE

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


def restarting_srun(manifest: Manifest, jobs: list[Job]) -> str:
    """Return shell code for `INDEX`, and a function `srun` that repeats srun if a worker dies.

    The worker's file state.json changes with each run that it begins, and a run kills at most two
    workers, so the number of restarts is bounded. `jobs` are those of an array, in its order.
    """
    numbers = [job.index for job in jobs]
    first, last = numbers[0], numbers[-1]
    listed = " ".join(map(str, numbers))
    is_range = len(numbers) > 1 and numbers == list(range(first, last + 1))
    return _SRUN.format(
        idle_restarts=IDLE_RESTARTS,
        indices=f"{{{first}..{last}}}" if is_range else listed,
        folder=shlex.quote(str(manifest.job_folder(0).parent)),
        state=STATE,
        again=STEP_AGAIN,
    )


def checked(line: str) -> str:
    """Return shell code that runs one line of the sweep's `slurm.setup` commands.

    If the line fails, the shell code prints an error and ends the job.
    """
    message = shlex.quote(f"setup failed: {line}")
    return f"{{ :\n{line}\n}} || {{ echo {message} >&2; exit 1; }}"
