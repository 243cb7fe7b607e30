"""Slurm jobs that are interrupted: time limits, preemption, memory limits, killed workers."""

from __future__ import annotations

import os
import re
import signal

import pytest

from jobs.results.record import Record
from tests.jobs.harness import Fifo, alive, artifacts_of, await_true, facts
from tests.jobs.launch.slurm_scenario import Scenarios, states, worker_pid
from tests.jobs.open_ports import attack, listening

LIMIT = {"resources": {"timeout_min": 1}}
BLOCKS = {"interleave": ["tag", "until"], "baseline": {"tag": 0}, "rounds": 2}

pytestmark = pytest.mark.slurm


@pytest.mark.slow
def test_two_nodes_of_two_processes(scenarios: Scenarios) -> None:
    """A job listens on one address, and what a stranger writes to its store is not unpickled.

    The run during which a node is lost is recorded, and the next run executes on all nodes.
    """
    fifos = {name: Fifo(scenarios.folder / name) for name in ("attacked", "lost")}
    there = {name: {"rank": 3, "path": str(fifo.path)} for name, fifo in fifos.items()}
    bomb = scenarios.folder / "bomb"
    scenario = scenarios.submit(
        "nodes",
        cases=[
            {"fixed": {"what": "pause", **there["attacked"]}},
            {"fixed": {"what": "raises", "rank": 3}},
            {"fixed": {"what": "hang_in_a_lock", "rank": 0}, "timeout_s": 24},
            {"fixed": {"what": "wait", **there["lost"]}},
            {"fixed": {"what": "ok", "artifact": "trace", "gloo": True}},
        ],
        runs_per_job=5,
        resources={"nodes": 2, "mem_gb": 3},
        launch={"nproc_per_node": 2},
    )
    scenario.wait_until_executing()
    rank, _ = fifos["attacked"].pids()
    leader, follower = (worker_pid(scenario, node_rank) for node_rank in (0, 1))
    (address,) = {address for address, _ in listening(leader) | listening(follower)}
    assert address in scenario.cluster.nodes
    attack(rank, bomb)
    fifos["attacked"].release()
    pids = fifos["lost"].pids()
    assert not bomb.exists()
    os.kill(follower, signal.SIGKILL)
    await_true(lambda: not any(map(alive, pids)), "what the follower had started ended")

    attacked, raised, hung, lost, measured = scenario.finish()
    assert attacked.status == "ok", attacked.failure
    assert facts(attacked)["environment"]["MASTER_ADDR"] == address
    assert attacked.slurm["job_nodelist"].count("127") == 1  # 127.0.0.[2-3]
    assert raised.status == "error" and raised.failure.rank == 3
    assert "in raises" in raised.failure.traceback
    assert hung.status == "timeout"
    ranks = re.split(r"\[rank \d\]", hung.failure.traceback)[1:]
    assert len(ranks) == 4 and "in hang_in_a_lock" in ranks[0] and "in barrier" in ranks[3]
    assert lost.failure.type == "NodeLost"
    assert measured.status == "ok", measured.failure
    samples = measured.measurements.samples_ms["call"]
    assert [list(rank) for rank in samples] == [[n, n] for n in (1.0, 2.0, 3.0, 4.0)]
    assert set(artifacts_of(scenario.out, measured)) == {f"trace{rank}" for rank in range(4)}
    assert lost.slurm == measured.slurm  # neither requeued nor submitted again


@pytest.mark.slow
def test_each_node_uses_the_gpus_that_slurm_gave_it(scenarios: Scenarios) -> None:
    """On the first of two nodes, another job holds GPU 0.

    The GPUs are fictitious, so the ranks fail, and their errors name them.
    """
    cluster, (first, _, last) = scenarios.cluster, scenarios.cluster.nodes
    where = (f"--nodelist={first}", f"--gres=gpu:{cluster.gpus[0]}:1", "--mem=99")
    command = ("sbatch", *where, "--job-name=holder", "--output=/dev/null", "--wrap=sleep 900")
    held = cluster.client(*command)
    assert held.returncode == 0, held.stderr
    running = ("squeue", "-h", "--name=holder", "--states=RUNNING", "-o", "%i")
    cluster.wait_for(lambda: cluster.client(*running).stdout, "the holder of a GPU")
    scenario = scenarios.submit(
        "gpus",
        fixed={"tag": 0},
        resources={"nodes": 2, "gpus_per_node": 1, "mem_gb": 2.5},
        launch={"nproc_per_node": 1},
        slurm={"exclude": last},
    )
    (record,) = scenario.finish()
    cluster.client("scancel", "--name=holder")
    log = scenario.out / str(record.log)
    logs = [path.read_text() for path in (log, log.with_suffix(".node1.log"))]
    assert [re.findall(r"CUDA_VISIBLE_DEVICES=(\d)", text) for text in logs] == [["1"], ["0"]]


@pytest.mark.slow
def test_out_of_memory_in_slurms_eyes(scenarios: Scenarios) -> None:
    """If Slurm ends a job step for its memory, the run that was executing counts as oom."""
    scenario = scenarios.submit(
        "memory",
        grid={"what": ["fill_memory", "raises"]},
        runs_per_job=2,
        resources={"mem_gb": 1.5},
    )
    assert [record.status for record in scenario.finish()] == ["oom", "error"]
    assert states(scenario.status()) == ["oom", "error"]


@pytest.mark.exhaustive  # faster: test_an_early_warning_is_repeated_when_it_is_due
def test_time_limit(scenarios: Scenarios) -> None:
    """One minute is the shortest limit in Slurm. Only the interrupted run is repeated."""
    zipped = {"tag": [0, 1, 2], "until": ["", "requeued", ""]}
    interrupted = scenarios.submit("limit", zip=zipped, runs_per_job=3, **LIMIT)
    endless = scenarios.submit("endless", fixed={"until": "never"}, grid={"tag": [0]}, **LIMIT)
    found = [(r.params["tag"], r.status) for r in interrupted.finish()]
    assert found == [(0, "ok"), (1, "preempted"), (1, "ok"), (2, "ok")]
    (record,) = endless.finish()
    assert record.status == "timeout" and "limit of 1 min" in record.failure.message


# ---- blocks --------------------------------------------------------------------------------------


def block(until: str) -> dict[str, object]:
    """Return the parameters of a block of two runs, of which the second waits."""
    return {"tag": [0, 1], "until": ["", until]}


TRIAL = [(-1, 0, "ok"), (-1, 1, "ok")]


def whole(number: int) -> list[tuple[int, int, str]]:
    return [(number, tag, "ok") for tag in ((0, 0, 1) if number == 2 else (0, 1, 0))]


def rounds(records: list[Record]) -> list[tuple[int, int, str]]:
    """Return round (-1: trial), tag and status of each record, in the order of execution."""
    places = [(r, -1 if r.block.trial else r.block.round) for r in records if r.block]
    return [(number, r.params["tag"], r.status) for r, number in places]


def executions(records: list[Record]) -> int:
    return len({record.block.execution for record in records if record.block})


@pytest.mark.slow
def test_a_preempted_job_is_requeued_and_repeats_the_cut_trial(scenarios: Scenarios) -> None:
    """It ends in its grace time, after which Slurm would count it as failed."""
    cpus = scenarios.cluster.cpus
    scenario = scenarios.submit(
        "preempted",
        zip=block("requeued"),
        blocks=BLOCKS,
        slurm={"partition": "low"},
        resources={"cpus_per_task": cpus},
    )
    scenario.wait_until_executing(after=1)
    wanted = ("--partition=high", f"--cpus-per-task={cpus}", "--output=/dev/null", "--wrap=true")
    assert scenario.cluster.client("sbatch", *wanted).returncode == 0
    records = scenario.finish()
    assert rounds(records) == [TRIAL[0], (-1, 1, "preempted"), *TRIAL, *whole(0), *whole(1)]
    assert executions(records) == 4
    assert len({record.slurm["job_id"] for record in records}) == 1
    assert [r.slurm.get("restart_count") for r in records] == [None] * 2 + ["1"] * 8


@pytest.mark.slow
def test_a_block_goes_on_after_its_worker_is_killed_and_in_another_allocation(
    scenarios: Scenarios,
) -> None:
    """Complete rounds are kept, and on the same node also the trial of all but the baseline.

    A second submission meanwhile finds the block running.

    The second run waits in rounds 1 and 2, but not in the first round of the second worker.
    """
    three = BLOCKS | {"rounds": 3}
    scenario = scenarios.submit("block", zip=block("go"), fixed={"later": True}, blocks=three)
    scenario.wait_until_executing(after=6)  # in the second round
    os.kill(worker_pid(scenario, 0), signal.SIGKILL)
    scenario.wait_until_executing(after=12)  # in the third round
    twice = scenario.submit()
    assert twice.returncode == 0 and "skipping 9 runs already queued or running" in twice.stdout
    assert scenario.call("jobs", "cancel", "out").returncode == 0
    before = scenario.finish()
    first, second = [*TRIAL, *whole(0), (1, 0, "ok")], [TRIAL[0], *whole(1)]
    assert rounds(before) == [*first, *second, *whole(2)[:2], (2, 1, "cancelled")]
    scenario.release("go")
    node = before[0].slurm["job_nodelist"]
    again = scenario.submit(f"slurm.exclude={node}")
    assert again.returncode == 0 and "3 runs as 1 job" in again.stdout
    records = scenario.finish()
    assert rounds(records[13:]) == [*TRIAL, *whole(2)]
    assert executions(records) == 8
    assert len({record.allocation for record in records}) == 2
    assert {record.slurm["job_nodelist"] for record in records[13:]} != {node}
