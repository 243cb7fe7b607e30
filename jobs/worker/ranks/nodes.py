"""Coordination of the nodes of one job: the worker on node 0 leads, the other workers follow.

For each run, the leader sends the followers a request to start their ranks and, if needed, an order
to stop the ranks. Each follower answers with a report.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from jobs.worker.fork_server import EXIT_S
from jobs.worker.isolation import PAUSE_S, Child, ForkServer, oom_kills
from jobs.worker.messages import NodeReport, Order, Request
from jobs.worker.outcome import no_scratch
from jobs.worker.ranks.node_connections import accept_workers, connect_to_leader, receive, send
from jobs.worker.servers import ForkServers
from jobs.worker.torchrun import agent, collect, outcomes_in

CONSEQUENCES_S = 3.0  # time for the other ranks to report after a rank has failed, in seconds
LOOK_S = 0.5  # interval between checks for a failed rank, in seconds


class _Patience:
    """Deadline until which a node waits for the ranks of a run.

    At first, the deadline is the timeout of the run. When a rank fails, the deadline moves to at
    most CONSEQUENCES_S seconds later. This is enough for the other ranks to report their failures.
    torchrun alone would wait 30 s for a rank that ignores SIGTERM.
    """

    def __init__(self, scratch: Path, seconds: float):
        self._scratch = scratch
        self._looked = time.monotonic()
        self._deadline = self._looked + seconds
        self.failed = False

    def look(self) -> bool:
        """Check whether a rank of this node has failed, and return whether time is left to wait.

        If a rank has failed, the deadline moves to at most CONSEQUENCES_S seconds after the failure
        is found.
        """
        if not self.failed and any(not outcome.is_ok for outcome in outcomes_in(self._scratch)):
            self.note_failure()
        now = time.monotonic()
        if now - self._looked > PAUSE_S:  # the job was suspended
            self._deadline += now - self._looked
        self._looked = now
        return now < self._deadline

    def note_failure(self) -> None:
        if not self.failed:
            self.failed = True
            self._deadline = min(self._deadline, time.monotonic() + CONSEQUENCES_S)

    def pause(self) -> float:
        return max(0.0, min(LOOK_S, self._deadline - time.monotonic()))


# ---- the leader: node 0 --------------------------------------------------------------------------


class Followers:
    """Connections from the leader, i.e. the worker on node 0, to the workers of the other nodes.

    The arguments and the error are those of `accept_workers`.
    """

    def __init__(self, count: int, rendezvous_file: Path):
        self.connections = accept_workers(count, rendezvous_file)

    def close(self) -> None:
        _tell(self.connections, Order(what="end"))
        for connection in self.connections:
            connection.close()


def _tell(followers: Iterable[Connection], order: Order) -> None:
    for connection in followers:
        with suppress(OSError):  # `_report_of` tells that the connection is lost
            send(connection, order)


def lead(
    server: ForkServer,
    request: Request,
    followers: Followers | None,
    timeout_s: float,
    on_start: Callable[[Child], object],
) -> tuple[list[NodeReport], bool]:
    """Execute a run with several ranks on all nodes of the job. Node 0 calls this function.

    On each node, a torchrun agent starts the ranks. When the ranks of a node have ended, the node
    sends a report. If a rank fails, or if the run reaches its timeout, the ranks of all nodes are
    stopped.

    Args:
        followers: connections to the workers of the other nodes; None if the job has only one node.

    Returns:
        The reports of all nodes, starting with node 0, and whether the run was killed because it
        reached its timeout.
    """
    scratch = Path(request.scratch)
    kills = oom_kills()
    patience = _Patience(scratch, timeout_s)
    child = server.start(agent, request, scratch=request.scratch)
    on_start(child)
    try:
        others: list[Connection] = []
        if followers is not None and (endpoint := _endpoint(child, scratch, patience)):
            others = list(followers.connections)
            _tell(others, Order(what="run", request=request.on(endpoint=endpoint)))
        waiting: list[Any] = [child, *others]
        reports = _await_reports(child, waiting, request, kills, patience)
        expired = bool(waiting) and not patience.failed
        late = [one for one in waiting if one is not child]
        _tell(late, Order(what="stacks" if expired else "stop"))
        if expired and not child.ended:
            child.stacks(scratch)
        own = collect(request, kills, child)
        return [own, *reports, *(_last_word(one, request.token) for one in late)], expired
    finally:
        child.kill()


def _await_reports(
    child: Child, waiting: list[Any], request: Request, kills: int, patience: _Patience
) -> list[NodeReport]:
    """Wait until all nodes have reported or the deadline passes.

    Return the reports of the other nodes. `waiting` has `child` and the connections to the other
    nodes. Those that have reported are removed from it. `kills` is the value of `oom_kills()`
    before the run.
    """
    reports: list[NodeReport] = []
    while waiting and patience.look():
        for one in _ready(child, waiting, patience.pause()):
            if one is child:
                child.wait(0)
                report = collect(request, kills, child)
            else:
                received = _report_of(one, request.token)
                if received is None:
                    continue
                report = received
                reports.append(report)
            waiting.remove(one)
            if not report.is_ok:
                patience.note_failure()
    return reports


def _ready(child: Child, waiting: list[Any], seconds: float) -> list[Any]:
    """Wait at most `seconds`, and return the objects in `waiting` that are ready.

    `child` is ready when it has ended. It is in `waiting` as long as this node has not reported.
    """
    if child in waiting and child.ended:
        return [child]
    return list(wait(waiting, seconds))


def _endpoint(child: Child, scratch: Path, patience: _Patience) -> str | None:
    """Wait for the address of the rendezvous at which the torchrun agents of all nodes meet.

    The agent of node 0 opens the rendezvous and writes its address to the file endpoint.json.
    Return the address as host:port, or None if the agent ends or the deadline passes first.
    """
    path = scratch / "endpoint.json"
    while not path.exists():
        if child.wait(0.02) or not patience.look():
            return None
    return str(json.loads(path.read_text()))


def _report_of(connection: Connection, token: str) -> NodeReport | None:
    """Receive the report of another node about the attempt that `token` identifies.

    If the connection is lost, the report says so. None if the report is about an earlier attempt.
    """
    try:
        report = receive(connection, NodeReport)
    except ConnectionError:
        return NodeReport(token=token, lost="NodeLost")
    return report if report.token == token else None


def _last_word(connection: Connection, token: str) -> NodeReport:
    """Receive the last report of another node, which was ordered to stop the current run.

    If none arrives within a time limit, return an empty report.
    """
    deadline = time.monotonic() + EXIT_S + 5
    while connection.poll(max(0.0, deadline - time.monotonic())):
        report = _report_of(connection, token)
        if report is not None:
            return report
    return NodeReport(token=token)


# ---- a follower: any other node ------------------------------------------------------------------


def follow(rendezvous_file: Path, node_rank: int, servers: ForkServers, job_folder: Path) -> None:
    """Run the worker of a node other than node 0, until the job ends.

    The worker on node 0 leads: for each run, it asks this worker to start the ranks of this node.

    Args:
        job_folder: folder for this node's logs.

    Raises:
        RuntimeError: if this node cannot connect to the leader, see `connect_to_leader`.
    """
    leader = connect_to_leader(rendezvous_file)
    servers.get()  # import modules while the leader prepares the first run
    try:
        while True:
            order = receive(leader, Order)
            if order.what == "end":
                return
            if order.request is None:
                continue  # an order to stop that arrived after this node's report was sent
            request = order.request
            server = servers.get(request.checkout)
            try:
                scratch = Path(tempfile.mkdtemp(prefix="run-"))
            except OSError as error:  # this node goes on, so that the run gets the true cause
                send(leader, NodeReport(token=request.token, undelivered=no_scratch(error)))
                continue
            log = job_folder / f"{Path(request.log or '').stem}.node{node_rank}.log"
            mine = request.on(
                scratch=str(scratch),
                node_rank=node_rank,
                log=request.log and str(log),
            )
            try:
                send(leader, _run_here(server, mine, leader))
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError:
        return  # the leader has exited, which ends the job
    finally:
        servers.close()


def _run_here(server: ForkServer, request: Request, leader: Connection) -> NodeReport:
    """Execute this node's part of a run that the leader (the worker on node 0) has requested.

    The function starts the ranks of this node. It waits until they have ended or the leader orders
    to stop them. If a rank fails, the other ranks get a few seconds to end. `request` has the
    settings of this node.
    """
    scratch = Path(request.scratch)
    kills = oom_kills()
    patience = _Patience(scratch, float("inf"))  # the leader enforces the timeout
    child = server.start(agent, request, scratch=request.scratch)
    try:
        while not child.ended and patience.look():
            either: list[Any] = [child, leader]
            if leader in wait(either, patience.pause()):
                if receive(leader, Order).what == "stacks":
                    child.stacks(scratch)
                break
            child.wait(0)
        return collect(request, kills, child)
    finally:
        child.kill()
