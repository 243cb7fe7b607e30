"""Submissions to a real Slurm cluster, from the command line to the records.

All scenarios are submitted together, because most of them wait, and each test checks one of them.
The tests that delay others (the restart of the controller) come last.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.launch.slurm_executor import submit
from jobs.results.manifest import Executor
from jobs.results.record import Record
from tests.jobs.harness import write_submission
from tests.jobs.launch.slurm_cluster import SlurmCluster
from tests.jobs.launch.slurm_scenario import SOON_S, Scenario, Scenarios
from tests.jobs.small_disk import small_disk

LIMIT = {"resources": {"timeout_min": 1}}
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
        "preempted",
        zip={"index": [0, 1, 2], "until": ["", "requeued", ""]},
        runs_per_job=3,
        slurm={"partition": "low"},
        resources={"cpus_per_task": slurm_cluster.cpus},
    )
    scenarios.submit(
        "warned",
        zip={"index": [0, 1, 2], "until": ["", "requeued", ""]},
        runs_per_job=3,
        **LIMIT,
    )
    scenarios.submit(
        "cancelled",
        zip={"index": [0, 1, 2], "until": ["go", "", ""]},
        slurm={"array_parallelism": 1},
    )
    scenarios.submit("worker", zip={"index": [0, 1, 2], "until": ["", "never", ""]}, runs_per_job=3)
    scenarios.submit("failing", grid={"do": ["raise", "kill_self", "measure"]}, runs_per_job=3)
    scenarios.submit(
        "memory",
        grid={"do": ["measure", "eat_memory", "raise"]},
        runs_per_job=3,
        resources={"mem_gb": 1.5},
    )
    scenarios.submit("gpu", grid={"index": [0]}, resources={"gpus_per_node": 1})
    scenarios.submit(
        "nodes",
        benchmark="all_reduce",
        fixed={"backend": "gloo", "size_mb": 1, "world_size": 4, "samples": 5, "measure_s": 0.2},
        resources={"nodes": 2},
        launch={"nproc_per_node": 2},
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
    preempt(scenarios["preempted"])
    warn(scenarios["warned"])
    return scenarios


@pytest.fixture(scope="module")
def limits(slurm_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Scenarios:
    """Scenarios that reach the time limit. One minute is the shortest limit in Slurm."""
    scenarios = Scenarios(slurm_cluster, tmp_path_factory.mktemp("limits"))
    scenarios.submit(
        "limit",
        zip={"index": [0, 1, 2], "until": ["", "requeued", ""]},
        runs_per_job=3,
        **LIMIT,
    )
    scenarios.submit("endless", fixed={"until": "never"}, grid={"index": [0]}, **LIMIT)
    return scenarios


def preempt(scenario: Scenario) -> None:
    """Once the first run is done, preempt the job by a job of a partition with priority."""
    scenario.cluster.wait_for(scenario.records, SOON_S, "the first run")
    scenario.wait_until_executing()
    cpus = f"--cpus-per-task={scenario.cluster.cpus}"
    other = ("sbatch", "--partition=high", cpus, "--output=/dev/null", "--wrap=true")
    assert scenario.cluster.client(*other).returncode == 0


def warn(scenario: Scenario) -> None:
    """Once the second run executes, send the warning signal that precedes the time limit."""
    scenario.cluster.wait_for(scenario.records, SOON_S, "the first run")
    scenario.wait_until_executing()
    (line,) = scenario.queue()
    scancel = scenario.cluster.client("scancel", "--signal=USR2", line.split()[0])
    assert scancel.returncode == 0, scancel.stderr


def by_index(records: list[Record]) -> dict[int, list[Record]]:
    found: dict[int, list[Record]] = {}
    for record in records:
        found.setdefault(record.params["index"], []).append(record)
    return found


def states(status: dict[str, Any]) -> list[str]:
    return [task["state"] for task in status["tasks"]]


def test_submitting_in_flight_submits_nothing_twice(scenarios: Scenarios) -> None:
    scenario = scenarios["cancelled"]
    done = scenario.submit()
    assert done.returncode == 0
    assert "submitted 0 runs as 0 jobs" in done.stdout
    assert "skipping 3 runs already queued or running" in done.stdout
    assert len(scenario.queue()) == 3


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
    scenario.finish()
    assert states(scenario.status()) == ["ok"] * 3
    assert "cancelled 0 jobs" in scenario.call("jobs", "cancel", "out").stdout
    attempts = {i: [r.status for r in rs] for i, rs in by_index(scenario.records()).items()}
    assert attempts == {0: ["cancelled", "ok"], 1: ["ok"], 2: ["ok"]}


def test_killed_worker(scenarios: Scenarios) -> None:
    """The states of runs without records come from Slurm and the manifest."""
    scenario = scenarios["worker"]
    scenario.cluster.wait_for(scenario.records, SOON_S, "the first run")
    os.kill(scenario.wait_until_executing()["pid"], signal.SIGKILL)
    (record,) = scenario.finish()
    assert record.status == "ok"
    status = scenario.status()
    assert states(status) == ["ok", "killed", "killed"]
    assert all("FAILED" in task["detail"] for task in status["tasks"][1:])
    assert all("task 0: Killed" in task["detail"] for task in status["tasks"][1:])
    table = scenario.call("aggregate", "out")
    assert table.returncode == 0, table.stdout
    assert table.stdout.count(" killed |") == 2
    assert "killed: Slurm job" in table.stdout and "is FAILED" in table.stdout


def test_out_of_memory_in_slurms_eyes(scenarios: Scenarios) -> None:
    """If Slurm ends a job for its memory, only the run that was executing counts as oom."""
    scenario = scenarios["memory"]
    (record,) = scenario.finish()
    assert record.status == "ok"
    assert states(scenario.status()) == ["ok", "oom", "killed"]


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
        submit(manifest)
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
    assert re.search(r"given 1 GPU \(CUDA_VISIBLE_DEVICES=[01]\)", record.failure.message)


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


def test_unknown_partition(scenarios: Scenarios) -> None:
    scenario = scenarios.new("unknown", grid={"index": [0, 1]}, slurm={"partition": "nowhere"})
    done = scenario.submit()
    assert done.returncode == 2
    assert "sbatch refused 2 jobs" in done.stdout and "invalid partition" in done.stdout
    assert states(scenario.status()) == ["missing", "missing"]
    possible = scenario.submit("slurm.partition=debug", "--dry-run")
    assert "2 (0 done, 0 queued or running)" in possible.stdout


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
    assert status["tasks"][1]["detail"] == (
        "not submitted: Slurm refused the job or could not be reached; submit again"
    )


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
    assert "submitted 0 runs" in again.stdout


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


def assert_requeued(records: list[Record]) -> None:
    """Check that only the interrupted run was repeated after the requeue, and the rest executed."""
    attempts = by_index(records)
    statuses = {index: [record.status for record in attempts[index]] for index in attempts}
    assert statuses == {0: ["ok"], 1: ["preempted", "ok"], 2: ["ok"]}
    assert "restart_count" not in attempts[0][0].slurm
    assert attempts[1][1].slurm["restart_count"] == attempts[2][0].slurm["restart_count"] == "1"


def test_warning_of_the_time_limit(scenarios: Scenarios) -> None:
    assert_requeued(scenarios["warned"].finish())


def test_preemption(scenarios: Scenarios) -> None:
    """A job that ends in its grace time is requeued. Slurm would count it as failed otherwise."""
    assert_requeued(scenarios["preempted"].finish())


@pytest.mark.slow  # faster: test_warning_of_the_time_limit, and test_sbatch_text for --signal
def test_time_limit(limits: Scenarios) -> None:
    assert_requeued(limits["limit"].finish())


@pytest.mark.slow  # faster: test_preempted_then_over_the_limit_then_done
def test_run_that_never_fits_the_limit(limits: Scenarios) -> None:
    (record,) = limits["endless"].finish()
    assert record.status == "timeout"
    assert record.failure is not None and "limit of 1 min" in record.failure.message


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
