"""Runs of several ranks under torchrun on one node. Slurm's tests have a run on two nodes."""

from __future__ import annotations

from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest

from jobs.results.manifest import Executor
from jobs.results.record import Failure, Record
from jobs.status import Status
from jobs.worker.messages import AgentReport, NodeReport, Outcome, RankFailure
from jobs.worker.ranks import nodes
from jobs.worker.ranks.rank_failures import outcome_of_ranks
from jobs.worker.scratch import no_scratch
from tests.jobs.harness import (
    PATIENCE_S,
    artifacts_of,
    facts,
    only_record,
    run,
    start_python,
    write_submission,
    write_sweep,
)

TIMEOUT_S = 12  # timeout of hanging runs, in seconds; enough to start two ranks without torch
LONG_S = 200  # timeout of the other runs, in seconds


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
    options: list[str | Path] = ["--local", "--parallel", "2", "--out", out]
    run("jobs.submit", sweep, *options, environment={"TMPDIR": str(temporary)})
    return out


def took(record: Record) -> float:
    return record.finished_at - record.started_at


def concluding(record: Record) -> float:
    """Return the time from the moment that a rank raised to the end of the attempt, in seconds."""
    return took(record) - record.seconds.starting - record.seconds.measuring


def test_ok_has_times_and_memory_by_rank(here: Path) -> None:
    measurements = only_record(here, what="meet", tag=0).measurements
    assert [list(rank) for rank in measurements.samples_ms["call"]] == [[1.0, 1.0], [2.0, 2.0]]
    assert measurements.peak_memory_bytes == {"call": [10, 11]}


@pytest.mark.parametrize(
    ("what", "status", "rank", "kind"),
    [
        ("raises", "error", 1, "ValueError"),
        ("raises", "error", 0, "ValueError"),  # torchrun would wait 30 s for rank 1, which is deaf
        ("sigkill", "killed", 1, "SIGKILL"),
        ("os_exit", "error", 1, "exit code 0"),  # it has not measured
    ],
)
def test_the_rank_that_failed_is_named_and_not_the_one_that_lost_it(
    here: Path, what: str, status: str, rank: int, kind: str
) -> None:
    record = only_record(here, what=what, rank=rank)
    assert (record.status, record.failure.rank, record.failure.type) == (status, rank, kind)
    if what == "raises":
        assert "in raises\n" in record.failure.traceback
        assert concluding(record) < 25
    else:
        assert took(record) < LONG_S / 2


def test_a_hang_shows_where_every_rank_stands(here: Path) -> None:
    record = only_record(here, what="hang_in_a_lock")
    assert record.status == "timeout"
    ranks = record.failure.traceback.split("[rank 1]")
    assert ranks[0].startswith("[rank 0]") and "in barrier" in ranks[0]
    assert "in hang_in_a_lock" in ranks[1]
    assert TIMEOUT_S <= took(record) < LONG_S / 2


def test_the_ranks_of_a_run_leave_files_in_one_folder_and_none_in_the_temporary_one(
    here: Path,
) -> None:
    traces = artifacts_of(here, only_record(here, what="raises", rank=1))
    assert traces == {"trace0": "a trace", "trace1": "a trace"}
    left = {path.name for path in (here / "tmp").iterdir()}
    assert not {name for name in left if not name.startswith("torchinductor_")}  # torch's cache


def test_runs_at_once_do_not_meet(here: Path) -> None:
    first, second = (only_record(here, what="meet", tag=tag) for tag in (0, 1))
    assert first.job != second.job
    ports = {facts(record)["environment"]["MASTER_PORT"] for record in (first, second)}
    assert len(ports) == 2


WORKER = """
import sys; from pathlib import Path
from jobs.results.manifest import read_manifest; from jobs.worker.worker import Worker
Worker(read_manifest(Path(sys.argv[1])), 0, node_rank=int(sys.argv[2])).run()
"""


@pytest.mark.slow
def test_a_node_with_too_few_gpus_says_so(tmp_path: Path) -> None:
    """The first node has a GPU. It must not wait for minutes for the worker of the other one."""
    shape = {"launch": {"nproc_per_node": 1}, "resources": {"nodes": 2, "gpus_per_node": 1}}
    sweep = write_sweep(tmp_path, [{"what": "ok"}], **shape)
    manifest = write_submission(sweep, tmp_path / "out", Executor.slurm)
    node = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURMD_NODENAME": "127.0.0.1"}
    workers = [
        start_python("-c", WORKER, manifest.path, str(rank), environment=node | visible)
        for rank, visible in enumerate([{"CUDA_VISIBLE_DEVICES": gpus} for gpus in ("0", "")])
    ]
    said = [worker.communicate(timeout=PATIENCE_S)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], said
    record = only_record(manifest.folder)
    assert record.status == "unsupported" and record.failure.rank == 1
    assert "needs 1 GPU per node, but 0 GPUs visible" in record.failure.message


def test_a_node_that_does_not_answer_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise all later runs of the job would wait for it until their timeouts."""
    monkeypatch.setattr(nodes, "ANSWER_S", 0.0)
    leader, follower = Pipe()
    with leader, follower:
        assert nodes._last_word(leader).unable.failure.type == "NodeLost"


# ---- the verdict ---------------------------------------------------------------------------------


def node(ranks: list[Outcome], failures: list[tuple[int, int]], **more: Any) -> NodeReport:
    ended = [RankFailure(rank=rank, exit_code=code, at=100) for rank, code in failures]
    given = {"agent": AgentReport(failures=ended), "outcomes": ranks} | more
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
NOTHING = OK.model_copy(update={"rank": 1, "measurements": {}})
LOST_PEER = node([left(0, 49.0, True)], [(0, 1)])
FULL = no_scratch(OSError("the disk is full"))
CUT = node([], [], agent=None)  # a node on which the timeout ended the agent


@pytest.mark.parametrize(
    ("reports", "expired", "status", "rank"),
    [
        # the rank that raised first
        ([node([left(1, 50.0), left(0, 49.0)], [(0, 1), (1, 1)])], False, "error", 0),
        # rank 1 raised by itself, although rank 0 reported its lost peer earlier
        ([node([left(0, 49.0, True), left(1, 50.0)], [(0, 1), (1, 1)])], False, "error", 1),
        # the OOM killer was active on the node of rank 1 only
        ([LOST_PEER, node([], [(1, -9)], out_of_memory=True)], False, "oom", 1),
        # no failed rank is known, or the ranks disagree
        ([node([], [], agent=AgentReport(error="no rendezvous"))], False, "error", None),
        ([node([], [], agent=None, exit_code=-9)], False, "killed", None),
        # the agent was killed, and before it the rank that rank 0 lost
        ([node([left(0, 49.0, True)], [], agent=None, exit_code=-9)], False, "killed", None),
        ([node([OK, NOTHING], [])], False, "error", 1),
        # the temporary folder of one node is full, so its ranks could not report
        ([LOST_PEER, node([], [(1, 1)], unable=FULL)], False, "killed", None),
        # at the timeout: rank 1 lost the rank that was killed, was ended, or raised by itself
        ([CUT, node([left(1, 50.0, True)], [(1, 1)])], True, "timeout", None),
        ([CUT, node([], [(1, -15)])], True, "timeout", None),
        ([CUT, node([left(1, 50.0)], [(1, 1)])], True, "error", 1),
    ],
)
def test_which_rank_failed_first(
    reports: list[NodeReport], expired: bool, status: str, rank: int | None
) -> None:
    outcome = outcome_of_ranks(reports, expired=expired, timeout_s=1.0, world_size=2)
    assert outcome.status == status
    assert (outcome.failure.rank if outcome.failure else None) == rank
