"""Submissions to a real Slurm cluster, from the command line to the records."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from jobs.launch.slurm_executor import cluster_of, submit
from jobs.results.manifest import Executor
from tests.jobs.checkout import project_checkout
from tests.jobs.harness import facts, records, write_submission
from tests.jobs.launch.slurm_cluster import SlurmCluster
from tests.jobs.launch.slurm_scenario import HELD, Scenarios, states

pytestmark = pytest.mark.slurm


def test_jobs_of_two_shapes_and_the_retry_of_those_that_failed(scenarios: Scenarios) -> None:
    """Of four jobs, three are an array, since MaxArraySize is 3. A fifth wants a GPU."""
    cluster = scenarios.cluster
    typed = {"gpus_per_node": 1, "gpu_type": cluster.gpus[-1]}
    scenario = scenarios.new(
        "array",
        cases=[
            {"zip": {"tag": [0, 1], "what": ["raises", "sigkill"]}},
            {"grid": {"tag": list(range(2, 12))}},
            {"fixed": {"tag": 99}, "resources": typed},
        ],
        runs_per_job=cluster.max_array_size,
        slurm={"array_parallelism": 2},
    )
    done = scenario.submit_alone()
    assert done.returncode == 0, done.stdout
    *arrayed, on_gpu = sorted(scenario.finish(), key=lambda record: record.params["tag"])
    raised, killed, *others = arrayed

    assert raised.status == "error"
    assert "in raises" in raised.failure.traceback
    logs = scenario.call("jobs", "logs", raised.run, "--in", "out")
    assert "ValueError: the message" in logs.stdout
    assert killed.status == "killed" and killed.failure.type == "SIGKILL"
    assert [record.status for record in others] == ["ok"] * 10

    assert len({record.slurm.get("array_job_id") for record in arrayed}) == 2
    assert len({record.slurm["job_id"] for record in arrayed}) == 4
    array = [record for record in arrayed if "array_job_id" in record.slurm]
    at_once = [sum(r.started_at <= t.started_at < r.finished_at for r in array) for t in array]
    assert len(array) == 9 and max(at_once) <= 2

    # A job sees its own GPU only. The GPU is fictitious, so the run fails, and the error names it.
    assert on_gpu.status == "error"
    assert f"given 1 GPU (CUDA_VISIBLE_DEVICES={len(cluster.gpus) - 1})" in on_gpu.failure.message

    retried = scenario.call("jobs", "retry", "out", "--where", "tag < 2")
    assert "submitted 2 runs as 1 job;" in retried.stdout, retried.stdout
    again = [(r.run, r.status) for r in scenario.finish() if r.attempt == 2]
    assert again == [(raised.run, "error"), (killed.run, "killed")]


def test_a_failing_setup_beside_a_request_that_is_impossible(scenarios: Scenarios) -> None:
    """Jobs submitted before sbatch refuses others still run; the refused runs are missing."""
    scenario = scenarios.new(
        "setup",
        cases=[
            {"fixed": {"tag": 0}},
            {"fixed": {"tag": 1}, "resources": {"nodes": 5}},
        ],
        slurm={"setup": ["# comment", "export A=1", "[ $A = 1 ]", "cat /nowhere"]},
    )
    done = scenario.submit()
    assert done.returncode == 2
    assert "sbatch refused 1 job (5 nodes): sbatch: error" in done.stdout
    assert "job arrays submitted before stay submitted" in done.stdout
    assert scenario.finish() == []
    status = scenario.status()
    assert states(status) == ["killed", "missing"]
    begun, refused = status["tasks"]
    assert "setup failed: cat /nowhere" in begun["detail"]
    assert refused["detail"].startswith("not submitted: sbatch: error")
    logs = scenario.call("jobs", "logs", begun["run"], "--in", "out")
    assert "No such file or directory" in logs.stdout


def test_a_job_that_no_node_can_run_says_what_it_requests(scenarios: Scenarios) -> None:
    """sbatch accepts it, and the scheduler fails it without a start."""
    huge = {"mem_gb": 100_000, "cpus_per_task": 2}
    scenario = scenarios.submit("huge", fixed={"tag": 0}, resources=huge)
    assert scenario.finish() == []
    offer = "offer 1 node, 2 CPUs per node, 100000 GiB of memory per node"
    detail = scenario.status()["tasks"][0]["detail"]
    assert "is FAILED (BadConstraints: " in detail and f"{offer})" in detail
    assert offer in scenario.status()["tasks"][0]["detail"], "also once its state is saved"


def test_jobs_that_cannot_be_noted_are_not_submitted(
    scenarios: Scenarios, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither `status` nor `cancel` would find the jobs."""
    scenario = scenarios.new("unsaved", grid={"tag": [0, 1]}, fixed={"until": "never"})
    for name, value in scenario.cluster.environment.items():
        monkeypatch.setenv(name, value)
    manifest = write_submission(Path(scenario.write_sweep()), scenario.out, Executor.slurm)
    (manifest.path / "handles.json").mkdir()  # the file cannot be written
    with pytest.raises(IsADirectoryError):
        submit(manifest, "", *cluster_of(manifest.sweep.slurm))
    assert scenario.queue() == []


def test_a_refused_submission_is_not_the_last_one(scenarios: Scenarios) -> None:
    """Commands without a folder stay with the submission that Slurm accepted before."""
    scenario = scenarios.new("unknown", grid={"tag": [0, 1]}, slurm={"partition": "nowhere"})
    held = "slurm.additional_parameters={hold: true}"
    assert scenario.submit("slurm.partition=debug", held).returncode == 0
    done = scenario.call("jobs.submit", scenario.write_sweep(), "--out", "logs/refused")
    assert done.returncode == 2
    assert "sbatch refused 2 jobs" in done.stdout
    assert done.stdout.count("invalid partition specified: nowhere") == 1
    last = json.loads(scenario.call("jobs", "status", "--json").stdout)
    assert last["folder"] == str(scenario.out)
    status = json.loads(scenario.call("jobs", "status", "logs/refused", "--json").stdout)
    assert states(status) == ["missing", "missing"]
    assert "cancelled 2 jobs" in scenario.call("jobs", "cancel").stdout


@pytest.mark.slow
def test_cancel_and_resubmit(scenarios: Scenarios) -> None:
    """Of an array, one job executes a run and two more wait in it; the other is pending."""
    scenario = scenarios.submit(
        "cancelled",
        zip={"tag": [0, 1, 2, 3, 4, 5], "until": ["go", *[""] * 5]},
        runs_per_job=3,
        slurm={"array_parallelism": 1},
    )
    scenario.wait_until_executing()
    twice = scenario.submit()
    assert twice.returncode == 0 and "nothing to submit" in twice.stdout
    assert "skipping 6 runs already queued or running" in twice.stdout
    assert len(list((scenario.out / "submissions").iterdir())) == 1
    assert len(scenario.queue()) == 2
    assert states(scenario.status()) == ["running", *["queued"] * 5]

    done = scenario.call("jobs", "cancel", "out")
    assert done.returncode == 0 and "cancelled 2 jobs" in done.stdout, done.stdout
    assert [(r.params["tag"], r.status) for r in scenario.finish()] == [(0, "cancelled")]
    assert states(scenario.status()) == ["cancelled"] * 6
    assert scenario.call("jobs", "status", "out").returncode == 1

    scenario.release("go")
    again = scenario.submit()
    told = re.search(r"^Slurm jobs: (\d+_\[0-1\])$", again.stdout, re.MULTILINE)
    assert "submitted 6 runs as 2 jobs;" in again.stdout and told, again.stdout
    scenario.finish()
    shown = scenario.call("jobs", "status", "out").stdout
    assert re.search(rf": Slurm jobs? {re.escape(told[1])}\n", shown), shown
    assert states(scenario.status()) == ["ok"] * 6
    assert "cancelled 0 jobs" in scenario.call("jobs", "cancel", "out").stdout


@pytest.mark.slow
def test_one_job_from_inside_another(scenarios: Scenarios) -> None:
    """A job does not inherit the environment of the Slurm job in which it was submitted."""
    scenario = scenarios.new("inside", grid={"tag": [0]}, resources={"cpus_per_task": 2})
    leaks = {"RANK": "3", "MASTER_PORT": "29500", "SLURM_CPU_BIND": "quiet,mask_cpu:0x8"}
    done = scenario.submit_alone("srun", "--export=ALL", **leaks)
    assert done.returncode == 0, done.stdout
    (record,) = scenario.finish()
    seen = facts(record)["environment"]
    assert not {"RANK", "MASTER_PORT"} & seen.keys()
    assert seen.get("SLURM_CPU_BIND") != leaks["SLURM_CPU_BIND"]
    assert seen["CUDA_VISIBLE_DEVICES"] == ""
    assert seen["SLURM_CPUS_PER_TASK"] == "2"
    assert "array_job_id" not in record.slurm


@pytest.mark.slow
def test_two_submissions_at_the_same_time(scenarios: Scenarios) -> None:
    """Every run is submitted once. The first waits in sbatch until the second has ended."""
    scenario = scenarios.new("together", grid={"tag": [0, 1]}, slurm=HELD)
    until_go = "for _ in {1..1200}; do [ -e go ] && break; sleep 0.1; done"
    waiting = scenario.programs(sbatch=f'{until_go}; exec $real "$@"')
    with ThreadPoolExecutor() as threads:
        both = [threads.submit(scenario.submit_alone, **waiting) for _ in "ab"]
        wait(both, return_when=FIRST_COMPLETED)
        scenario.release("go")
    first, second = sorted((one.result() for one in both), key=lambda done: done.returncode)
    assert first.returncode == 0 and "submitted 2 runs" in first.stdout
    assert second.returncode == 2 and "is in use by process" in second.stdout
    assert len(scenario.queue()) == 2
    assert not (scenario.out / "submit.lock").exists()
    scenario.call("jobs", "cancel", "out")


@pytest.mark.slow
def test_an_interrupted_submission_names_the_jobs_that_stay(scenarios: Scenarios) -> None:
    """Signals wait for the answer of sbatch, which has accepted the first of two arrays."""
    cases = [{"fixed": {"tag": n - 1}, "resources": {"nodes": n}} for n in (1, 2)]  # two arrays
    scenario = scenarios.new("interrupted", cases=cases, slurm=HELD)
    interrupting = scenario.programs(
        sbatch='kill -TERM $PPID; kill -INT $PPID; sleep 3; exec $real "$@"'
    )
    done = scenario.submit_alone(**interrupting)
    assert done.returncode == 130, done.stdout
    assert "waiting for sbatch; Ctrl-C stops after" in done.stdout
    told = re.search(r"^interrupted: Slurm jobs (\d+) stay submitted; ", done.stdout, re.MULTILINE)
    assert told and f" cancel {scenario.out.name}" in done.stdout, done.stdout
    assert states(scenario.status()) == ["queued", "missing"]
    assert "cancelled 1 job" in scenario.call("jobs", "cancel", "out").stdout


# ---- another interpreter -------------------------------------------------------------------------

APPTAINER = """\
#!/bin/sh
# Does what `apptainer exec --nv IMAGE COMMAND` does, without a container.
[ "$1 $2 $3" = "exec --nv image.sif" ] || { echo "FATAL:   unexpected: $*" >&2; exit 255; }
shift 3
cd /
CONTAINER=apptainer exec "$@"
"""


@pytest.mark.slow
def test_all_processes_of_a_job_use_the_interpreter_in_its_container(scenarios: Scenarios) -> None:
    """One is in a virtual environment with the packages of this one, another does not exist."""
    image = scenarios.folder / "image"
    (image / "bin").mkdir(parents=True)
    for name in ("pyvenv.cfg", "lib", "bin/python"):
        (image / name).symlink_to(Path(sys.prefix) / name)
    (image / "bin" / "apptainer").write_text(APPTAINER)
    (image / "bin" / "apptainer").chmod(0o755)
    python = str(image / "bin" / "python")
    path = f"{image}/bin:{os.environ['PATH']}"
    command = f"apptainer exec --nv image.sif {shlex.quote(python)}"
    inside = scenarios.new("apptainer", grid={"tag": [0]}, slurm={"python": command})
    assert inside.submit(PATH=path).returncode == 0
    wrong = scenarios.submit("wrong", grid={"tag": [0]}, slurm={"python": "/nowhere/python"})
    (record,) = inside.finish()
    seen = facts(record)
    assert (seen["environment"]["CONTAINER"], seen["executable"]) == ("apptainer", python)
    assert seen["folder"] == str(inside.folder)
    assert wrong.finish() == []
    (task,) = wrong.status()["tasks"]
    assert task["state"] == "killed" and "/nowhere/python: No such file" in task["detail"]


# ---- commits while jobs wait ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--snapshot",)])
def test_a_held_job_runs_the_code_of_its_snapshot_or_else_the_present_code(
    tmp_path: Path, slurm_cluster: SlurmCluster, options: tuple[str, ...]
) -> None:
    """The project is changed while the job is held."""
    project = project_checkout(tmp_path / "sweeps")
    before = project.git("rev-parse", "HEAD")
    out = project.folder / "logs" / "own"
    hold = "slurm.additional_parameters={hold: true}"
    done = project.python(
        *("jobs.submit", "own.yaml", hold, "--out", out, *options),
        project=project.folder,
        **slurm_cluster.environment,
    )
    assert done.returncode == 0, done.stdout
    with (project.folder / "systems" / "benchmark.py").open("a") as file:
        file.write("# edited\n")
    after = project.commit(helper="VALUE = 'new'\n")
    (path,) = out.glob("submissions/*/handles.json")
    (handle,) = json.loads(path.read_text()).values()
    assert not records(out)
    assert slurm_cluster.client("scontrol", "release", handle["slurm"]).returncode == 0
    (record,) = slurm_cluster.wait_for(lambda: records(out), "the released job")
    code = [record.environment["git"], *record.environment["code"]]
    assert {state["commit"] for state in code} == {before if options else after}
    assert {state["dirty"] for state in code} == {False}
    assert facts(record)["code"] == ("old" if options else "new")
    assert [("snapshot" in state) for state in code] == [bool(options)] * 2
