"""Submissions to a real Slurm cluster, from the command line to the records.

All scenarios are submitted together, because most of them wait, and each test checks one of them.
The tests that delay others (the restart of the controller) come last.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.launch.slurm_executor import submit
from jobs.results.manifest import Executor
from tests.jobs.harness import write_submission
from tests.jobs.launch.slurm_cluster import SlurmCluster
from tests.jobs.launch.slurm_scenario import (
    SOON_S,
    Scenario,
    Scenarios,
    by_index,
    states,
    worker_pid,
)
from tests.jobs.open_ports import attack, listening, ranks_below
from tests.jobs.small_disk import small_disk

LAST = 99  # index of the run that raises

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def scenarios(
    slurm_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Scenarios]:
    scenarios = Scenarios(slurm_cluster, tmp_path_factory.mktemp("results of scenarios"))
    full = scenarios.new("full", benchmark="tests.benchmarks.misbehave", runs_per_job=3)
    ballast = str(full.out / "ballast")
    full.sweep["cases"] = [
        {"fixed": {"what": "ok"}},
        {"fixed": {"what": "fill_disk", "path": ballast}},
        {"fixed": {"what": "ok", "tag": 1}},
    ]
    with small_disk(full.out, 512):
        Path(ballast).touch()
        assert full.submit().returncode == 0
        yield with_submissions(scenarios, slurm_cluster)


def with_submissions(scenarios: Scenarios, slurm_cluster: SlurmCluster) -> Scenarios:
    scenarios.submit(
        "cancelled",
        zip={"index": [0, 1, 2], "until": ["go", "", ""]},
        slurm={"array_parallelism": 1},
    )
    scenarios.submit(
        "partly",
        zip={"index": [0, 1, 2, 3, 4], "until": ["go", "", "", "", ""]},
        runs_per_job=3,
        slurm={"array_parallelism": 1},
    )
    scenarios.submit("failing", grid={"do": ["raise", "kill_self", "measure"]}, runs_per_job=3)
    typed = {"gpus_per_node": 1, "gpu_type": slurm_cluster.gpus[-1]}
    scenarios.submit("gpu", grid={"index": [0]}, resources=typed)
    scenarios.submit(
        "nodes",
        benchmark="all_reduce",
        fixed={"backend": "gloo", "size_mb": 1, "world_size": 4, "samples": 5, "measure_s": 0.2},
        resources={"nodes": 2},
        launch={"nproc_per_node": 2},
    )
    scenarios.submit(
        "ports",
        fixed={"until": "go"},
        grid={"index": [0]},
        resources={"nodes": 2},
        launch={"nproc_per_node": 1},
    )
    scenarios.submit(
        "setup", grid={"index": [0, 1]}, slurm={"setup": ["# comment", "cat /nowhere"]}
    )
    array = scenarios.new(
        "array",
        cases=[
            {"grid": {"index": list(range(slurm_cluster.max_array_size + 1))}},
            {"fixed": {"index": LAST, "do": "raise"}},
        ],
        slurm={"array_parallelism": 4},
    )
    done = array.submit_alone()
    assert done.returncode == 0, done.stdout
    return scenarios


@pytest.mark.slow
def test_submitting_in_flight_submits_nothing_twice(scenarios: Scenarios) -> None:
    scenario = scenarios["cancelled"]
    done = scenario.submit()
    assert done.returncode == 0
    assert "nothing to submit" in done.stdout
    assert len(list((scenario.out / "submissions").iterdir())) == 1
    assert "skipping 3 runs already queued or running" in done.stdout
    assert len(scenario.queue()) == 3


@pytest.mark.slow
def test_cancel_and_resubmit(scenarios: Scenarios) -> None:
    scenario = scenarios["cancelled"]
    scenario.wait_until_executing()
    assert states(scenario.status()) == ["running", "queued", "queued"]
    done = scenario.run_alone(sys.executable, "-m", "jobs", "cancel", "out")
    assert done.returncode == 0 and "cancelled 3 jobs" in done.stdout, done.stdout
    (record,) = scenario.finish()
    assert (record.status, record.params["index"]) == ("cancelled", 0)
    assert states(scenario.status()) == ["cancelled"] * 3
    assert scenario.call("jobs", "status", "out").returncode == 1

    scenario.release("go")
    done = scenario.submit()
    assert "submitted 3 runs as 3 jobs" in done.stdout
    told = re.search(r"^Slurm jobs: (\d+_\[0-2\])$", done.stdout, re.MULTILINE)
    assert told is not None, done.stdout
    scenario.finish()
    assert f": Slurm jobs {told[1]}\n" in scenario.call("jobs", "status", "out").stdout
    assert states(scenario.status()) == ["ok"] * 3
    assert "cancelled 0 jobs" in scenario.call("jobs", "cancel", "out").stdout
    attempts = {i: [r.status for r in rs] for i, rs in by_index(scenario.records()).items()}
    assert attempts == {0: ["cancelled", "ok"], 1: ["ok"], 2: ["ok"]}


@pytest.mark.slow
def test_cancel_some_runs_and_resubmit_them(scenarios: Scenarios) -> None:
    """A job of which all runs match is cancelled. Another skips the runs that have not started."""
    scenario = scenarios["partly"]
    scenario.wait_until_executing()
    done = scenario.call("jobs", "cancel", "out", "--where", "index in [0, 1, 3, 4]")
    assert "cancelled 1 job of" in done.stdout, done.stdout
    assert "; 1 run of jobs that continue will be skipped; 1 executing run" in done.stdout
    expected = ["running", "cancelled", "queued", "cancelled", "cancelled"]
    assert states(scenario.status()) == expected
    again = scenario.submit()  # while the first job executes
    assert "submitted 3 runs as 1 job;" in again.stdout
    assert "skipping 2 runs already queued or running" in again.stdout
    scenario.cluster.wait_for(
        lambda: len(scenario.records()) == 3, SOON_S, "the runs that were submitted again"
    )
    scenario.release("go")
    attempts = {i: [r.status for r in rs] for i, rs in by_index(scenario.finish()).items()}
    assert attempts == {index: ["ok"] for index in range(5)}
    assert states(scenario.status()) == ["ok"] * 5


@pytest.mark.slow
def test_a_stranger_executes_no_code_on_two_nodes(scenarios: Scenarios) -> None:
    """A job listens on one address, and what a stranger writes to its store is not unpickled."""
    scenario = scenarios["ports"]
    scenario.wait_until_executing()
    logs = "submissions/*/jobs/0/*.node1.log"
    scenario.cluster.wait_for(lambda: list(scenario.out.glob(logs)), SOON_S, "node 1 to execute")
    leader, follower = (worker_pid(scenario, node_rank) for node_rank in (0, 1))
    rank = scenario.cluster.wait_for(lambda: ranks_below(follower), SOON_S, "the rank of node 1")[0]
    (address,) = {address for address, _ in listening(leader) | listening(follower)}
    assert address in scenario.cluster.nodes
    attack(rank, scenario.folder / "bomb")
    scenario.release("go")
    (record,) = scenario.finish()
    assert record.status == "ok", record.failure
    assert not (scenario.folder / "bomb").exists()


@pytest.mark.slow
def test_full_disk(scenarios: Scenarios) -> None:
    scenario = scenarios["full"]
    assert [record.params["what"] for record in scenario.finish()] == ["ok"]
    status = scenario.status()
    assert states(status) == ["ok", "killed", "killed"]
    assert "is FAILED" in status["tasks"][1]["detail"]
    note = f"cannot write results to {scenario.out}: No space left on device; free space and repeat"
    assert [line.startswith(note) for line in status["notes"]] == [True]
    (scenario.out / "ballast").unlink()
    assert scenario.submit().returncode == 0
    assert [record.status for record in scenario.finish()] == ["ok"] * 3
    assert not scenario.status()["notes"]


def test_jobs_whose_ids_cannot_be_saved_are_cancelled(
    scenarios: Scenarios, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without their ids, neither `status` nor `cancel` would find the jobs."""
    scenario = scenarios.new("unsaved", grid={"index": [0, 1]}, fixed={"until": "never"})
    for name, value in scenario.cluster.environment.items():
        monkeypatch.setenv(name, value)
    manifest = write_submission(Path(scenario.write_sweep()), scenario.out, Executor.slurm)
    (manifest.path / "handles.json").mkdir()  # the file cannot be written
    with pytest.raises(IsADirectoryError):
        submit(manifest, scenario.cluster.max_array_size, lambda: None)
    scenario.cluster.wait_for(lambda: not scenario.queue(), SOON_S, "the jobs to be cancelled")


def test_failing_runs(scenarios: Scenarios) -> None:
    """Runs that raise or are killed do not affect the next run of the job."""
    scenario = scenarios["failing"]
    raised, killed, measured = scenario.finish()
    assert raised.status == "error"
    assert raised.failure is not None and "told to raise" in (raised.failure.traceback or "")
    assert killed.status == "killed"
    assert killed.failure is not None and killed.failure.type == "SIGKILL"
    assert measured.status == "ok"
    logs = scenario.call("jobs", "logs", raised.run, "--in", "out")
    assert "ValueError: run 0 was told to raise" in logs.stdout

    replay = [sys.executable, "-m", "jobs", "replay", measured.run, "--in", "out"]
    replayed = scenario.run_alone(*replay)
    assert replayed.returncode == 0, replayed.stdout
    assert "python -m jobs.submit" in replayed.stdout

    retried = scenario.call("jobs", "retry", "out")
    assert "submitted 2 runs as 1 job;" in retried.stdout
    again = scenario.finish()[3:]
    assert [(r.run, r.status, r.attempt) for r in again] == [
        (raised.run, "error", 2),
        (killed.run, "killed", 2),
    ]


def test_gpu_job_sees_its_gpu_alone(scenarios: Scenarios) -> None:
    """A job sees only its own GPU. It is fictitious, so the run fails and the error names it."""
    (record,) = scenarios["gpu"].finish()
    assert record.status == "error" and record.failure is not None
    number = len(scenarios.cluster.gpus) - 1  # the GPU of the requested type
    assert f"given 1 GPU (CUDA_VISIBLE_DEVICES={number})" in record.failure.message


def test_two_nodes_of_two_processes(scenarios: Scenarios) -> None:
    (record,) = scenarios["nodes"].finish()
    assert record.status == "ok", record.failure
    assert record.measurements is not None
    assert len(record.measurements.samples_ms["latency"]) == 4
    assert record.slurm["job_nodelist"].count("127") == 1  # 127.0.0.[2-3]


def test_failing_setup_ends_the_job(scenarios: Scenarios) -> None:
    scenario = scenarios["setup"]
    assert scenario.finish() == []
    status = scenario.status()
    assert states(status) == ["killed", "killed"]
    assert all("setup failed: cat /nowhere" in task["detail"] for task in status["tasks"])
    logs = scenario.call("jobs", "logs", status["tasks"][0]["run"], "--in", "out")
    assert "No such file or directory" in logs.stdout


# Prints a line when it is ready to submit, and submits when its stdin ends.
SUBMIT_TOGETHER = """
import sys
from jobs.submit import app
print("ready", flush=True)
sys.stdin.read()
app(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "rounds", [2, pytest.param(20, marks=pytest.mark.exhaustive)], ids=["few", "many"]
)
def test_two_submissions_at_the_same_time(scenarios: Scenarios, rounds: int) -> None:
    """Every run is submitted once, whichever submission is first."""
    indices = [0, 1, 2]
    together: list[Scenario] = []
    for number in range(rounds):
        scenario = scenarios.new(f"together{rounds}-{number}", grid={"index": indices})
        together.append(scenario)
        arguments = [scenario.write_sweep(), "--out", "out"]
        both = [
            scenario.start_alone(sys.executable, "-c", SUBMIT_TOGETHER, *arguments) for _ in "ab"
        ]
        for process in both:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for process in both:
            assert process.stdin is not None
            process.stdin.close()
        for process in both:
            process.stdin = None
        outputs = {p.communicate()[0]: p.returncode for p in both}
        for output, code in outputs.items():
            if code == 0:
                assert "submitted 3 runs" in output or "3 runs already queued or run" in output
            else:
                assert code == 2 and "is in use by process" in output
                assert str(scenario.out / "submit.lock") in output and "--force" in output
        assert sum("submitted 3 runs" in output for output in outputs) == 1
        assert not (scenario.out / "submit.lock").exists()
    for scenario in together:
        assert sorted(r.params["index"] for r in scenario.finish()) == indices


def test_unknown_partition(scenarios: Scenarios) -> None:
    scenario = scenarios.new("unknown", grid={"index": [0, 1]}, slurm={"partition": "nowhere"})
    done = scenario.submit()
    assert done.returncode == 2
    assert "sbatch refused 2 jobs" in done.stdout
    assert done.stdout.count("invalid partition specified: nowhere") == 1
    assert "the sweep, cluster.yaml or the command line set slurm.partition=nowhere" in done.stdout
    status = scenario.status()
    assert states(status) == ["missing", "missing"]
    reason = "not submitted: sbatch: error: invalid partition specified: nowhere; sbatch: error: "
    assert all(task["detail"].startswith(reason) for task in status["tasks"])
    possible = scenario.submit("slurm.partition=debug", "--dry-run")
    assert "2 (0 done, 0 queued or running)" in possible.stdout


@pytest.mark.slow
def test_a_refused_submission_is_not_the_last_one(scenarios: Scenarios) -> None:
    """Commands without a folder stay with the submission that Slurm accepted before."""
    scenario = scenarios.new(
        "accepted", zip={"index": [0], "until": ["go"]}, slurm={"partition": "nowhere"}
    )
    assert scenario.submit("slurm.partition=debug").returncode == 0
    sweep = scenario.write_sweep()
    assert scenario.call("jobs.submit", sweep, "--out", "logs/refused").returncode == 2
    seen = json.loads(scenario.call("jobs", "status", "--json").stdout)
    assert seen["folder"] == str(scenario.out)
    command = [sys.executable, "-m", "jobs", "logs", seen["tasks"][0]["run"], "--follow"]
    following = scenario.start(*command)
    assert following.stdout is not None and "#" in following.stdout.readline()
    scenario.release("go")
    rest, _ = following.communicate(timeout=SOON_S)
    assert following.returncode == 0 and "-> ok\n" in rest, rest


@pytest.mark.slow
def test_an_interrupted_submission_names_the_jobs_that_stay(scenarios: Scenarios) -> None:
    cases = [{"fixed": {"index": i}, "timeout_s": 100 * (i + 1)} for i in (0, 1)]  # two arrays
    scenario = scenarios.new("interrupted", cases=cases)
    sbatch = scenario.folder / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(f'#!/bin/sh\nkill -INT $PPID\nexec {shutil.which("sbatch")} "$@"\n')
    sbatch.chmod(0o755)
    done = scenario.submit_alone(PATH=f"{sbatch.parent}:{os.environ['PATH']}")
    assert done.returncode == 130, done.stdout
    told = re.search(r"^interrupted: Slurm jobs (\d+) stay submitted; ", done.stdout, re.MULTILINE)
    assert told and f" cancel {scenario.out.name}" in done.stdout, done.stdout
    scenario.finish()
    assert states(scenario.status()) == ["ok", "missing"]


def test_one_of_two_requests_is_impossible(scenarios: Scenarios) -> None:
    """Jobs submitted before sbatch refuses others still run; the refused runs are missing."""
    impossible = {"fixed": {"index": 1}, "resources": {"nodes": 5}}
    scenario = scenarios.new("refused", cases=[{"fixed": {"index": 0}}, impossible])
    done = scenario.submit()
    assert done.returncode == 2
    assert "sbatch refused 1 job (5 nodes): sbatch: error" in done.stdout
    assert "job arrays submitted before the refusal stay submitted" in done.stdout
    scenario.finish()
    status = scenario.status()
    assert states(status) == ["ok", "missing"]
    assert status["tasks"][1]["detail"].startswith("not submitted: sbatch: error")


@pytest.mark.slow
def test_one_job_from_inside_another(scenarios: Scenarios) -> None:
    """A job does not inherit the environment of the Slurm job in which it was submitted."""
    scenario = scenarios.new("inside", grid={"index": [0]}, resources={"cpus_per_task": 2})
    leaks = {"RANK": "3", "MASTER_PORT": "29500", "SLURM_CPU_BIND": "quiet,mask_cpu:0x8"}
    done = scenario.submit_alone("srun", "--export=ALL", **leaks)
    assert done.returncode == 0, done.stdout
    (record,) = scenario.finish()
    assert record.status == "ok" and record.measurements is not None, record.failure
    seen = record.measurements.facts["environment"]
    assert (seen["RANK"], seen["MASTER_PORT"]) == (None, None)
    assert seen["SLURM_CPU_BIND"] != leaks["SLURM_CPU_BIND"]
    assert seen["CUDA_VISIBLE_DEVICES"] == ""
    assert seen["SLURM_CPUS_PER_TASK"] == "2"
    assert "array_job_id" not in record.slurm

    again = scenario.submit()
    assert again.returncode == 0
    assert "skipping 1 run with a result" in again.stdout
    assert "nothing to submit" in again.stdout


def test_array(scenarios: Scenarios) -> None:
    """Jobs are split into two arrays by MaxArraySize, and at most four run at the same time."""
    scenario = scenarios["array"]
    records = scenario.finish()
    assert len({record.slurm["array_job_id"] for record in records}) == 2
    jobs = scenarios.cluster.max_array_size + 2
    assert len(by_index(records)) == len(records) == jobs
    (raised,) = (record for record in records if record.status != "ok")
    assert (raised.status, raised.params["index"]) == ("error", LAST)
    assert raised.failure is not None and "told to raise" in (raised.failure.traceback or "")
    at_once = [sum(r.started_at <= t.started_at < r.finished_at for r in records) for t in records]
    assert 1 < max(at_once) <= 4


@pytest.mark.slow
def test_restarted_controller(scenarios: Scenarios) -> None:
    cluster = scenarios.cluster
    scenario = scenarios.submit(
        "restart", zip={"index": [0, 1], "until": ["down", "up"]}, runs_per_job=2
    )
    scenario.wait_until_executing()
    cluster.stop_controller()
    try:
        status = scenario.status()
        assert any("Slurm does not answer" in note for note in status["notes"])
        assert states(status) == ["running", "queued"]
        scenario.release("down")
        cluster.wait_for(scenario.records, SOON_S, "the first run to end without a controller")
    finally:
        cluster.start_controller()
    scenario.release("up")
    assert [record.status for record in scenario.finish()] == ["ok", "ok"]
    assert states(scenario.status()) == ["ok", "ok"]
