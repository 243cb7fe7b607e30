"""sbatch scripts and the task of a job, tested without a Slurm cluster."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import slurm_client
from jobs.launch.slurm_executor import restarting_srun
from jobs.results.manifest import Executor
from jobs.worker.environment import job_environment
from tests.jobs.harness import ROOT, call, write_submission, write_sweep
from tests.jobs.results_folder import TOY, write

# Stands for the program srun. Each call reads an exit code from the file `codes`. If "+" precedes
# it, the call changes the state of job 7, as a worker does that begins a run.
SRUN = """\
#!/bin/sh
read -r code < codes
sed -i 1d codes
echo call >> calls
case $code in +*) echo x >> id/jobs/7/state.json ;; esac
exit "${code#+}"
"""


@pytest.mark.parametrize(
    ("codes", "calls", "code"),
    [
        (["143"], 1, 143),  # cancelled or over the time limit
        (["+137", "+139", "+134", "+135", "+137", "+0"], 6, 0),  # each began a run
        (["137", "137", "+137", "137", "137", "137", "0"], 6, 137),  # the last three began none
    ],
)
def test_restarts_of_the_job_step(tmp_path: Path, codes: list[str], calls: int, code: int) -> None:
    cases = [{"what": "ok", "tag": tag} for tag in range(8)]
    sweep = write_sweep(tmp_path, cases, runs_per_job=1)
    manifest = write_submission(sweep, tmp_path / "out", Executor.slurm)
    (tmp_path / "id").symlink_to(manifest.path)
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    function = restarting_srun(manifest, manifest.jobs[5:])
    script = f"set -e\n{function}\nsrun --unbuffered"
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_ARRAY_TASK_ID": "2"}
    (tmp_path / "codes").write_text("\n".join([*codes, ""]))
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment)
    assert done.returncode == code
    assert len((tmp_path / "calls").read_text().splitlines()) == calls


# The task of a Slurm job whose worker gets Slurm's warning a second or two too early.
WARNED_EARLY = """
import os, signal, time
from types import SimpleNamespace
from jobs.launch import worker_task

class Worker:
    node_rank, job, has_begun, is_stuck = 0, SimpleNamespace(timeout_min=1), True, STUCK
    started = time.monotonic() - AGE

    def run(self):
        os.kill(os.getpid(), signal.SIGUSR2)
        print("continued", flush=True)
        time.sleep(60)

    def stop(self, reason):
        print("stopped:", reason)

worker_task._requeue = lambda: print("requeued") or 0
worker_task.run(Worker())
"""


# Tells that the job ends 17 s after the first call, as if its limit had been changed.
SCONTROL = """\
#!/bin/sh
[ -e "$0.end" ] || /bin/date -d '17 seconds' +'EndTime=%Y-%m-%dT%H:%M:%S' > "$0.end"
/bin/cat "$0.end"
"""


@pytest.mark.parametrize(("stuck", "slurm_answers"), [(False, True), (True, False)])
def test_an_early_warning_is_repeated_when_it_is_due(
    tmp_path: Path, stuck: bool, slurm_answers: bool
) -> None:
    """A job whose trial and first round do not fit its time limit is not requeued forever."""
    age = 0 if slurm_answers else 44
    if slurm_answers:
        (tmp_path / "scontrol").write_text(SCONTROL)
        (tmp_path / "scontrol").chmod(0o755)
    environment = job_environment() | {"SLURM_JOB_ID": "7", "PATH": str(tmp_path)}
    code = WARNED_EARLY.replace("STUCK", str(stuck)).replace("AGE", str(age))
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    note, *rest = done.stdout.splitlines()
    assert re.search(r"warning of the time limit is early; continuing for [12] s", note), done
    assert rest == ["continued", "stopped: limit", *([] if stuck else ["requeued"])]
    assert ("raise resources.timeout_min" in done.stderr) == stuck


RESOURCES = """\
resources:
  {nodes: 2, gpus_per_node: 4, gpu_type: h100, cpus_per_task: 6, mem_gb: 1.5, timeout_min: 1}
"""
CLUSTER = """\
slurm:
  partition: h100
  account: it's mine
  qos: long
  array_parallelism: 2
  constraint: nvlink
  python: apptainer exec --nv 'my image.sif' python3
  srun_args: [--cpu-bind=none]
  additional_parameters: {reservation: bench, no-requeue: true, job-name: mine, mem: 0}
"""


def test_dry_run_shows_the_sbatch_scripts_with_the_settings_of_the_cluster(tmp_path: Path) -> None:
    cluster, out = tmp_path / "cluster.yaml", tmp_path / "out"
    cluster.write_text(CLUSTER)
    sweep = write(tmp_path, TOY + "grid: {size: [1, 2, 3]}\n" + RESOURCES)
    options = ["--dry-run", "--sbatch", "--cluster-file", cluster, "--out", out]
    done = call("jobs.submit", sweep, *options)
    assert done.returncode == 0, done.stderr
    assert f"settings of {cluster}" in done.stdout
    assert " 0.4 GPU-hours" in done.stdout  # 3 jobs of 1 minute on 2 nodes of 4 GPUs
    lines = done.stdout.splitlines()
    for line in (
        "--array=0-2%2",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=h100:4",
        "--cpus-per-task=6",
        "--mem=0",
        "--job-name=mine",
        "--no-requeue",
        "--time=1",
        "--signal=USR2@15",
        "--partition=h100",
        "--qos=long",
        "--constraint=nvlink",
        "--reservation=bench",
        """--account='it'"'"'s mine'""",
    ):
        assert f"#SBATCH {line}" in lines
    options = [re.match(r"#SBATCH --([\w-]+)", line) for line in lines]
    names = [found[1] for found in options if found]
    assert not {"requeue", "exclusive"} & set(names) and len(set(names)) == len(names)
    assert "--kill-on-bad-exit=1 --export=ALL --cpus-per-task=6 --cpu-bind=none" in done.stdout
    assert " apptainer exec --nv 'my image.sif' python3 -u -m jobs.launch.wor" in done.stdout
    assert not out.exists()


def test_controller_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A submission ends soon, says what was tried, and writes nothing."""
    monkeypatch.setattr(slurm_client, "PING_S", 0.5)
    if shutil.which("scontrol") is None:
        pytest.skip("Slurm is not installed")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections, never answers
        configuration = tmp_path / "slurm.conf"
        configuration.write_text(
            f"ClusterName=silent\nSlurmctldHost=silent(127.0.0.1)\nAuthType=auth/none\n"
            f"SlurmctldPort={silent.getsockname()[1]}\nNodeName=silent\n"
        )
        environment = {"SLURM_CONF": str(configuration)}
        out = tmp_path / "out"
        done = call("jobs.submit", "sweeps/quickstart.yaml", "--out", out, environment=environment)
    assert done.returncode == 2
    assert "'scontrol ping' did not end within" in done.stderr
    assert str(configuration) in done.stderr and "nothing was submitted" in done.stderr
    assert not out.exists()
