"""Runs of several ranks under torchrun, on one node and on two nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from jobs.results.manifest import Executor
from jobs.results.record import Failure, Record
from jobs.status import Status
from jobs.worker.environment import job_environment
from jobs.worker.isolation import ForkServer
from jobs.worker.messages import AgentReport, NodeReport, Outcome, RankFailure, Request
from jobs.worker.ranks.nodes import lead
from jobs.worker.ranks.rank_failures import outcome_of_ranks
from tests.jobs.harness import (
    LEAKS,
    PATIENCE_S,
    ROOT,
    Fifo,
    alive,
    artifacts_of,
    await_true,
    facts,
    only_record,
    records,
    run,
    write_submission,
    write_sweep,
)

TIMEOUT_S = 12  # timeout of hanging runs, in seconds; enough to start two ranks without torch
LONG_S = 200  # timeout of the other runs, in seconds
TRACES = {"trace0": "a trace", "trace1": "a trace"}  # artifacts of two ranks


# Main program of the worker of one node. `start_node` gives it the environment of a Slurm job.
NODE = """
import sys
from pathlib import Path
from jobs.results.manifest import read_manifest
from jobs.worker.worker import Worker

worker = Worker(read_manifest(Path(sys.argv[1])), 0, node_rank=int(sys.argv[2]))
worker.handle_term()
worker.run()
"""


def start_node(submission: Path, rank: int) -> subprocess.Popen[bytes]:
    """Start the worker of one of two nodes, which are addresses of this machine."""
    slurm = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2"}
    return subprocess.Popen(
        [sys.executable, "-c", NODE, str(submission), str(rank)],
        cwd=ROOT,
        env=job_environment() | slurm | {"SLURMD_NODENAME": f"127.0.0.{2 + rank}"},
    )


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of two concurrent jobs on this machine, with two ranks per run."""
    out = tmp_path_factory.mktemp("here")
    temporary = out / "tmp"
    temporary.mkdir()
    cases: list[dict[str, Any]] = [
        {"what": "meet", "rank": 0, "path": str(out / "met")},
        {"what": "hang_in_a_lock", "rank": 1, "timeout_s": TIMEOUT_S},
        {"what": "os_exit", "rank": 1},
        {"what": "meet", "rank": 0, "path": str(out / "met"), "tag": 1},
        {"what": "raises", "rank": 1, "artifact": "trace", "gloo": True},
        {"what": "sigkill", "rank": 1},
        {"what": "raises", "rank": 0, "deaf": True},
    ]
    shape = {"launch": {"nproc_per_node": 2}, "runs_per_job": 3, "timeout_s": LONG_S}
    sweep = write_sweep(out, cases, **shape)
    environment = LEAKS | {"TMPDIR": str(temporary)}
    options: list[str | Path] = ["--local", "--parallel", "2", "--out", out]
    run("jobs.submit", sweep, *options, environment=environment)
    return out


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results of a job on two simulated nodes with a rank each, of which one worker is killed."""
    out = tmp_path_factory.mktemp("nodes")
    fifo = Fifo(out / "fifo")
    cases: list[dict[str, Any]] = [
        {"what": "ok", "artifact": "trace", "gloo": True},
        {"what": "raises", "rank": 1},
        {"what": "hang_in_a_lock", "rank": 0, "timeout_s": TIMEOUT_S},
        {"what": "wait", "rank": 1, "path": str(fifo.path)},
        {"what": "ok", "tag": 1},
    ]
    shape = {
        "launch": {"nproc_per_node": 1},
        "resources": {"nodes": 2, "gpus_per_node": 0},
        "timeout_s": LONG_S,
    }
    manifest = write_submission(write_sweep(out, cases, **shape), out, Executor.slurm)
    leader, follower = (start_node(manifest.path, rank) for rank in (0, 1))
    pids = fifo.pids()
    os.kill(follower.pid, signal.SIGKILL)
    assert leader.wait(PATIENCE_S) == 1
    follower.wait()
    await_true(lambda: not any(map(alive, pids)), "what the follower had started ended")
    return out


def took(record: Record) -> float:
    return record.finished_at - record.started_at


def concluding(record: Record) -> float:
    """Return the time from the moment that a rank raised to the end of the attempt, in seconds."""
    assert record.seconds.starting is not None and record.seconds.measuring is not None
    return took(record) - record.seconds.starting - record.seconds.measuring


def test_ok_has_times_and_memory_by_rank(here: Path) -> None:
    measurements = only_record(here, what="meet", tag=0).measurements
    assert measurements is not None
    assert [list(rank) for rank in measurements.samples_ms["call"]] == [[1.0, 1.0], [2.0, 2.0]]  # type: ignore[arg-type]
    assert measurements.peak_memory_bytes == {"call": [10, 11]}


def test_the_rank_that_raised_is_named_and_not_the_one_that_lost_it(here: Path) -> None:
    record = only_record(here, what="raises", rank=1)
    assert record.status == "error" and record.failure is not None
    assert (record.failure.rank, record.failure.type) == (1, "ValueError")
    assert "in raises\n" in str(record.failure.traceback)
    assert concluding(record) < 25


def test_ranks_that_do_not_heed_sigterm_do_not_delay_the_verdict(here: Path) -> None:
    record = only_record(here, what="raises", rank=0)
    assert record.failure is not None and record.failure.rank == 0
    assert concluding(record) < 25  # torchrun itself would wait 30 s for rank 1


def test_a_rank_that_is_killed_is_named(here: Path) -> None:
    record = only_record(here, what="sigkill")
    assert record.status == "killed" and record.failure is not None
    assert (record.failure.rank, record.failure.type) == (1, "SIGKILL")
    assert took(record) < LONG_S / 2


def test_a_rank_that_leaves_with_exit_code_0_has_not_measured(here: Path) -> None:
    record = only_record(here, what="os_exit")
    assert record.status == "error" and record.failure is not None
    assert (record.failure.rank, record.failure.type) == (1, "exit code 0")


def test_a_hang_shows_where_every_rank_stands(here: Path) -> None:
    record = only_record(here, what="hang_in_a_lock")
    assert record.status == "timeout" and record.failure is not None
    ranks = str(record.failure.traceback).split("[rank 1]")
    assert ranks[0].startswith("[rank 0]") and "in barrier" in ranks[0]
    assert "in hang_in_a_lock" in ranks[1]
    assert TIMEOUT_S <= took(record) < LONG_S / 2


def test_what_surrounds_the_submission_does_not_reach_the_ranks(here: Path) -> None:
    environment = facts(only_record(here, what="meet", tag=0))["environment"]
    assert environment["RANK"] == "0" and environment["WORLD_SIZE"] == "2"
    assert environment["MASTER_PORT"] != "1" and environment["MASTER_ADDR"] != "10.0.0.1"
    assert environment["TORCHELASTIC_RUN_ID"] != "another"
    assert not [name for name in environment if name.startswith("SLURM_")]


def test_the_ranks_of_a_run_leave_files_in_one_folder(here: Path) -> None:
    assert artifacts_of(here, only_record(here, what="raises", rank=1)) == TRACES


def test_nothing_stays_in_the_temporary_folder(here: Path) -> None:
    left = {path.name for path in (here / "tmp").iterdir()}
    assert not {name for name in left if not name.startswith("torchinductor_")}  # torch's cache


def test_runs_at_once_do_not_meet(here: Path) -> None:
    first, second = (only_record(here, what="meet", tag=tag) for tag in (0, 1))
    assert first.job != second.job
    ports = {facts(record)["environment"]["MASTER_PORT"] for record in (first, second)}
    assert len(ports) == 2


# ---- two nodes ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_nodes_measure_together_by_the_first_ones_address(nodes: Path) -> None:
    record = only_record(nodes, what="ok")
    assert facts(record)["environment"]["MASTER_ADDR"] == "127.0.0.2"
    assert artifacts_of(nodes, record) == TRACES
    measurements = record.measurements
    assert measurements is not None
    assert [list(rank) for rank in measurements.samples_ms["call"]] == [[1.0, 1.0], [2.0, 2.0]]  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_failure_on_another_node_is_told_with_its_rank(nodes: Path) -> None:
    record = only_record(nodes, what="raises")
    assert record.failure is not None and (record.failure.rank, record.status) == (1, "error")
    assert "in raises\n" in str(record.failure.traceback)
    assert concluding(record) < 25


@pytest.mark.slow
def test_a_hang_shows_the_stacks_of_every_node(nodes: Path) -> None:
    record = only_record(nodes, what="hang_in_a_lock")
    assert record.status == "timeout" and record.failure is not None
    assert "in hang_in_a_lock" in str(record.failure.traceback)
    assert "in barrier" in str(record.failure.traceback)


@pytest.mark.slow
def test_a_node_that_is_lost_ends_the_job(nodes: Path) -> None:
    record = only_record(nodes, what="wait")
    assert record.status == "killed" and record.failure is not None
    assert record.failure.type == "NodeLost"
    assert [r.params["tag"] for r in records(nodes) if r.params["what"] == "ok"] == [0]
    assert not list(nodes.glob("submissions/*/jobs/*/rendezvous-*"))


def test_an_agent_that_ends_before_the_others_can_join_is_told_at_once(tmp_path: Path) -> None:
    server = ForkServer(["jobs.worker.torchrun"])
    wrong = Request(
        benchmark="tests.benchmarks.misbehave",
        version=1,
        params={"what": "ok"},
        scratch=str(tmp_path),
        gpus=[],
        artifacts=str(tmp_path / "artifacts"),
        token="a",
        asked_at=0.0,
        nodes=2,
        nproc_per_node=None,
    )
    follower, _ = Pipe()
    reports, expired = lead(server, wrong, [follower], 60, lambda child: None)
    agent = reports[0].agent
    assert not expired and agent is not None and "AssertionError" in str(agent.error)
    server.close()


# ---- the verdict ---------------------------------------------------------------------------------


def node(ranks: list[Outcome], failures: list[tuple[int, int]], **more: Any) -> NodeReport:
    ended = [RankFailure(rank=rank, exit_code=code, at=100) for rank, code in failures]
    given = {"token": "t", "agent": AgentReport(failures=ended), "outcomes": ranks} | more
    return NodeReport(**given)


def left(rank: int, ended_at: float, by_another: bool = False) -> Outcome:
    return Outcome(
        status=Status.error,
        failure=Failure(type="ValueError", message=f"of rank {rank}"),
        rank=rank,
        ended_at=ended_at,
        lost_peer=by_another,
    )


OK = Outcome(status=Status.ok, measuring=1.0, measurements={"samples_ms": {"a": [1.0]}})


@pytest.mark.parametrize(
    ("reports", "status", "rank"),
    [
        # the rank that raised first, whether torchrun ended the other by SIGTERM or it raised too
        ([node([left(1, 50.0)], [(0, -15), (1, 1)])], "error", 1),
        ([node([left(1, 50.0), left(0, 49.0)], [(0, 1), (1, 1)])], "error", 0),
        # rank 1 raised by itself, although rank 0 reported its lost peer earlier
        ([node([left(0, 49.0, True), left(1, 50.0)], [(0, 1), (1, 1)])], "error", 1),
        # rank 1 was killed, although only rank 0 could report
        ([node([left(0, 49.0, True)], [(0, 1), (1, -9)])], "killed", 1),
        ([node([], [(0, -15), (1, -11)])], "killed", 1),
        # the OOM killer was active on the node of rank 1 only
        (
            [node([left(0, 9.0, True)], [(0, 1)]), node([], [(1, -9)], out_of_memory=True)],
            "oom",
            1,
        ),
        # rank 1 exited without an outcome
        ([node([left(0, 49.0, True)], [(0, 1)])], "error", 1),
        ([node([OK], [(1, 3)])], "error", 1),
        # no failed rank is known, or the ranks disagree
        ([node([], [], agent=AgentReport(error="no rendezvous"))], "error", None),
        ([node([], [], agent=None, exit_code=-9)], "killed", None),
        ([node([], [], lost="NodeLost")], "killed", None),
        # the temporary folder of one node is full, so its ranks could not report
        (
            [node([left(0, 49.0, True)], [(0, 1)]), node([], [(1, 1)], undelivered="full")],
            "killed",
            None,
        ),
        ([node([OK, OK.model_copy(update={"rank": 1, "measurements": {}})], [])], "error", 1),
        ([node([OK, OK.model_copy(update={"rank": 1})], [])], "ok", None),
    ],
)
def test_which_rank_failed_first(reports: list[NodeReport], status: str, rank: int | None) -> None:
    outcome = outcome_of_ranks(reports, expired=False, timeout_s=1.0, world_size=2)
    assert outcome.status == status
    assert (outcome.failure.rank if outcome.failure else None) == rank


@pytest.mark.parametrize(
    ("other", "status"),
    [
        (node([left(1, 50.0, True)], [(1, 1)]), "timeout"),  # it lost the rank that was killed
        (node([], [(1, -15)]), "timeout"),
        (node([left(1, 50.0)], [(1, 1)]), "error"),  # it raised by itself, just before the timeout
    ],
)
def test_what_an_end_at_the_timeout_brings_about_is_no_failure(
    other: NodeReport, status: str
) -> None:
    ended = node([], [], agent=None)
    outcome = outcome_of_ranks([ended, other], expired=True, timeout_s=1.0, world_size=2)
    assert outcome.status == status
