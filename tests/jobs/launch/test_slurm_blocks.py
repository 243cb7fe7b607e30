"""Blocks on a Slurm cluster: a job that is interrupted repeats the round that was cut."""

from __future__ import annotations

import os
import signal

import pytest

from jobs.results.record import Record
from tests.jobs.launch.slurm_cluster import SlurmCluster
from tests.jobs.launch.slurm_scenario import SOON_S, Scenario, Scenarios
from tests.jobs.launch.test_slurm_interruptions import warn

BLOCKS = {"interleave": ["index", "until"], "baseline": {"index": 0}, "rounds": 2}

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def scenarios(slurm_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Scenarios:
    scenarios = Scenarios(slurm_cluster, tmp_path_factory.mktemp("blocks"))
    submit(scenarios, "killed", "go")
    submit(scenarios, "moved", "go", fixed={"later": True})
    return scenarios


def submit(scenarios: Scenarios, name: str, until: str, **keys: object) -> Scenario:
    """Submit a block of two runs, of which the second waits."""
    members = {"index": [0, 1], "until": ["", until]}
    return scenarios.submit(name, zip=members, blocks=BLOCKS, **keys)


def rounds(records: list[Record]) -> list[tuple[int, int, str]]:
    """Return round, index and status of each record, in the order of execution."""
    return [(r.block.round, r.params["index"], r.status) for r in records if r.block]


def executions(records: list[Record]) -> int:
    return len({record.block.execution for record in records if record.block})


WHOLE = [(n, index, "ok") for n in range(2) for index in (0, 1, 0)]


@pytest.mark.slow  # faster: the next test, and those of requeued jobs without blocks
def test_requeued_job_repeats_the_cut_round(
    slurm_cluster: SlurmCluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The only job of the block executes its rounds, also those after the requeue."""
    scenarios = Scenarios(slurm_cluster, tmp_path_factory.mktemp("requeued"))
    scenario = submit(scenarios, "requeued", "requeued", resources={"timeout_min": 1})
    warn(scenario)
    records = scenario.finish()
    assert rounds(records) == [(0, 0, "ok"), (0, 1, "preempted"), *WHOLE]
    assert executions(records) == 3
    assert len({record.slurm["job_id"] for record in records}) == 1


@pytest.mark.slow
def test_worker_that_is_killed_repeats_the_cut_round(scenarios: Scenarios) -> None:
    scenario = scenarios["killed"]
    scenario.cluster.wait_for(scenario.records, SOON_S, "the first run")
    state = scenario.wait_until_executing()
    os.kill(state["pid"], signal.SIGKILL)
    scenario.release("go")
    records = scenario.finish()
    assert rounds(records) == [(0, 0, "ok"), *WHOLE]
    assert executions(records) == 3


@pytest.mark.slow
def test_cancelled_block_continues_in_another_allocation(scenarios: Scenarios) -> None:
    """Complete rounds are kept. A second submission meanwhile finds the block running."""
    scenario = scenarios["moved"]
    scenario.cluster.wait_for(lambda: len(scenario.records()) == 4, SOON_S, "the second round")
    scenario.wait_until_executing()  # between runs, the worker would record no cancelled run
    twice = scenario.submit()
    assert twice.returncode == 0 and "skipping 6 runs already queued or running" in twice.stdout
    assert scenario.call("jobs", "cancel", "out").returncode == 0
    before = scenario.finish()
    assert rounds(before) == [*WHOLE[:3], (1, 0, "ok"), (1, 1, "cancelled")]
    scenario.release("go")
    node = before[0].slurm["job_nodelist"]
    again = scenario.submit(f"slurm.exclude={node}")
    assert again.returncode == 0 and "3 runs as 1 job" in again.stdout
    records = scenario.finish()
    assert rounds(records[5:]) == WHOLE[3:]
    assert executions(records) == 3
    assert len({record.allocation for record in records}) == 2
    assert {record.slurm["job_nodelist"] for record in records[5:]} != {node}
