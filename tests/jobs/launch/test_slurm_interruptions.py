"""Slurm jobs that are interrupted: time limits, preemption, memory limits, killed workers."""

from __future__ import annotations

import os
import signal

import pytest

from jobs.results.record import Record
from tests.jobs.launch.slurm_cluster import SlurmCluster
from tests.jobs.launch.slurm_scenario import (
    SOON_S,
    Scenario,
    Scenarios,
    by_index,
    states,
    worker_pid,
)

LIMIT = {"resources": {"timeout_min": 1}}

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def scenarios(slurm_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Scenarios:
    scenarios = Scenarios(slurm_cluster, tmp_path_factory.mktemp("interruptions"))
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
    scenarios.submit("worker", zip={"index": [0, 1, 2], "until": ["", "never", ""]}, runs_per_job=3)
    scenarios.submit(
        "memory",
        grid={"do": ["measure", "eat_memory", "raise"]},
        runs_per_job=3,
        resources={"mem_gb": 1.5},
    )
    scenarios.submit("short", zip={"index": [0], "until": ["go"]}, **LIMIT)
    scenarios.submit(
        "follower",
        zip={"index": [0, 1], "until": ["never", ""]},
        runs_per_job=2,
        resources={"nodes": 2},
        launch={"nproc_per_node": 1},
    )
    warn_early(scenarios["short"])
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
    send_warning(scenario)


def warn_early(scenario: Scenario) -> None:
    """Send the warning signal, and let the run end once the worker has handled the signal."""
    send_warning(scenario)

    def handled() -> bool:
        logs = scenario.out.glob("submissions/*/slurm/*_log.out")
        return any("is early; continuing" in path.read_text() for path in logs)

    scenario.cluster.wait_for(handled, SOON_S, "the worker to handle the signal")
    scenario.release("go")


def send_warning(scenario: Scenario) -> None:
    scenario.wait_until_executing()
    (line,) = scenario.queue()
    scancel = scenario.cluster.client("scancel", "--signal=USR2", line.split()[0])
    assert scancel.returncode == 0, scancel.stderr


@pytest.mark.slow
def test_killed_worker(scenarios: Scenarios) -> None:
    """The job continues in the same allocation, without the run that killed two workers."""
    scenario = scenarios["worker"]
    scenario.cluster.wait_for(scenario.records, SOON_S, "the first run")
    pids: list[int] = []
    while len(pids) < 2:
        pid = scenario.cluster.wait_for(
            lambda: {s["pid"] for s in scenario.worker_states()} - {*pids}, SOON_S, "a worker"
        ).pop()
        scenario.wait_until_executing()
        os.kill(pid, signal.SIGKILL)
        pids.append(pid)
    records = scenario.finish()
    assert [(r.params["index"], r.status) for r in records] == [(0, "ok"), (1, "killed"), (2, "ok")]
    assert records[1].failure is not None and records[1].failure.type == "WorkerDied"
    assert len({record.slurm["job_id"] for record in records}) == 1
    assert all("restart_count" not in record.slurm for record in records)


@pytest.mark.slow
def test_killed_worker_of_another_node(scenarios: Scenarios) -> None:
    """The run during which a node is lost is recorded, and the next run executes on all nodes."""
    scenario = scenarios["follower"]
    scenario.wait_until_executing()
    # Node 1 has received the request when the run's log on that node exists.
    logs = "submissions/*/jobs/0/*.node1.log"
    scenario.cluster.wait_for(lambda: list(scenario.out.glob(logs)), SOON_S, "node 1 to execute")
    os.kill(worker_pid(scenario, node_rank=1), signal.SIGKILL)
    lost, measured = scenario.finish()
    assert lost.failure is not None and lost.failure.type == "NodeLost"
    assert (measured.params["index"], measured.status) == (1, "ok"), measured.failure
    assert lost.slurm == measured.slurm  # neither requeued nor submitted again


@pytest.mark.slow
def test_out_of_memory_in_slurms_eyes(scenarios: Scenarios) -> None:
    """If Slurm ends a job step for its memory, the run that was executing counts as oom."""
    scenario = scenarios["memory"]
    assert [record.status for record in scenario.finish()] == ["ok", "oom", "error"]
    assert states(scenario.status()) == ["ok", "oom", "error"]


def assert_requeued(records: list[Record]) -> None:
    """Check that only the interrupted run was repeated after the requeue, and the rest executed."""
    attempts = by_index(records)
    statuses = {index: [record.status for record in attempts[index]] for index in attempts}
    assert statuses == {0: ["ok"], 1: ["preempted", "ok"], 2: ["ok"]}
    assert "restart_count" not in attempts[0][0].slurm
    assert attempts[1][1].slurm["restart_count"] == attempts[2][0].slurm["restart_count"] == "1"


@pytest.mark.slow
def test_warning_of_the_time_limit(scenarios: Scenarios) -> None:
    assert_requeued(scenarios["warned"].finish())


@pytest.mark.slow
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


@pytest.mark.slow
def test_early_warning_of_the_time_limit(scenarios: Scenarios) -> None:
    """Slurm may warn most of a minute early. A run that ends in time is not interrupted."""
    scenario = scenarios["short"]
    assert [record.status for record in scenario.finish()] == ["ok"]
