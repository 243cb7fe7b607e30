"""Executes a run on the nodes of a job: the worker on node 0 leads, the other workers follow.

For each run with several ranks, the leader sends the followers an order to start their ranks and,
if needed, an order to stop the ranks. Each follower answers with a report. A run of one process is
the part of node 0.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

from jobs.status import Status
from jobs.worker.isolation import Deadline, ForkServer, oom_kills, wait_for
from jobs.worker.messages import NodeReport, Order, Request
from jobs.worker.outcome import failed
from jobs.worker.ranks.node_connections import connect_to_leader, receive, send
from jobs.worker.run_process import run_alone
from jobs.worker.scratch import collect, no_scratch, outcomes_in
from jobs.worker.servers import ForkServers
from jobs.worker.torchrun import agent

CONSEQUENCES_S = 3.0  # time for the other ranks to report after a rank has failed, in seconds
LOOK_S = 0.5  # interval between checks for a failed rank, in seconds
# Maximum wait for the report of a node that was ordered to stop, in seconds. It may take 26 s to
# write stacks and to kill processes and their server, if a driver keeps them.
ANSWER_S = 30.0
_NODE_LOST = failed(
    Status.killed,
    "NodeLost",
    "the worker on another node of the job ended or lost its connection; see that node's log, "
    "and submit the sweep again to repeat the run",
)


class Part:
    """The part of a run that this node executes, and the deadline until which the node waits.

    Its processes and its scratch folder exist until the end of the `with` block. Raises OSError if
    the folder cannot be created.

    At first, the deadline is the timeout of the run. When a rank fails, it moves to at most
    CONSEQUENCES_S later, in which the other ranks report their failures. torchrun alone would wait
    30 s for a rank that ignores SIGTERM.
    """

    def __init__(self, server: ForkServer, request: Request, timeout_s: float):
        self._kills = oom_kills()
        self._report: NodeReport | None = None
        self._deadline = Deadline(timeout_s)
        self.scratch = Path(tempfile.mkdtemp(prefix="run-"))
        self.request = request.on(scratch=str(self.scratch))
        self.failed = False
        function = run_alone if request.nproc_per_node is None else agent
        # The server removes the folder if this worker is killed.
        self.child = server.start(function, self.request, scratch=self.request.scratch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.child.kill()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def look(self) -> bool:
        """Check whether a process here has failed, and return whether time is left to wait."""
        if any(not outcome.is_ok for outcome in outcomes_in(self.scratch)) or (
            self.child.ended and not self.report().is_ok
        ):
            self.note_failure()
        return self._deadline.left() > 0

    def note_failure(self) -> None:
        if not self.failed:
            self.failed = True
            self._deadline.shorten(CONSEQUENCES_S)

    def ready(self, others: list[Connection]) -> list[Connection]:
        """Wait for a moment, or for this node's part, and return the connections with a message."""
        waiting: list[Any] = others if self.child.ended else [self.child, *others]
        found = wait(waiting, max(0.0, min(LOOK_S, self._deadline.left())))
        self.child.wait(0)
        return [one for one in found if isinstance(one, Connection)]

    def report(self) -> NodeReport:
        if self._report is None:
            self._report = collect(self.request, self._kills, self.child)
        return self._report

    def endpoint(self) -> str | None:
        """Wait for the address of the store of node 0's agent. None if the part ends first."""
        path = self.scratch / "endpoint.json"
        while not path.exists():
            if self.child.wait(0.02) or not self.look():
                return None
        return str(json.loads(path.read_text()))


def _tell(followers: Iterable[Connection], order: Order) -> None:
    for connection in followers:
        with suppress(OSError):  # `_report_of` tells that the connection is lost
            send(connection, order)


def lead(part: Part, followers: list[Connection]) -> tuple[list[NodeReport], bool]:
    """Execute a run on all nodes of the job. Node 0 calls this function.

    If the run has ranks, a torchrun agent on each node starts them. If a rank fails, or if the run
    reaches its timeout, the ranks of all nodes are stopped. `followers` are the workers of the
    other nodes. Returns the reports of all nodes, node 0 first, and whether the run reached its
    timeout.
    """
    request = part.request
    waiting: list[Connection] = []  # nodes that have not reported
    if followers and (endpoint := part.endpoint()):
        waiting = list(followers)
        _tell(waiting, Order(request=request.on(endpoint=endpoint)))
    reports: list[NodeReport] = []
    while (waiting or not part.child.ended) and part.look():
        for one in part.ready(waiting):
            report = _report_of(one)
            waiting.remove(one)
            reports.append(report)
            if not report.is_ok:
                part.note_failure()
    expired = bool(waiting or not part.child.ended) and not part.failed
    _tell(waiting, Order(stacks=expired))
    if expired and not part.child.ended:
        part.child.stacks()
    own = part.report()
    return [own, *reports, *map(_last_word, waiting)], expired


def _report_of(connection: Connection) -> NodeReport:
    """Receive the report of another node, or report that the node is lost."""
    try:
        return receive(connection, NodeReport)
    except ConnectionError:
        return NodeReport(unable=_NODE_LOST)


def _last_word(connection: Connection) -> NodeReport:
    """Receive the report of a node that was ordered to stop. One that is silent is lost."""
    answers = wait_for([connection], ANSWER_S)
    return _report_of(connection) if answers else NodeReport(unable=_NODE_LOST)


def follow(
    rendezvous_file: Path,
    node_rank: int,
    servers: ForkServers,
    job_folder: Path,
    unsupported: str | None,
) -> None:
    """Run the worker of a node other than node 0: it starts the ranks of its node as ordered.

    If the node does not support the job, it answers each order with this reason instead.
    """
    leader = connect_to_leader(rendezvous_file)
    servers.get()  # import modules while the leader prepares the first run
    with suppress(OSError):  # the leader has closed the connection, so the job is over
        while True:
            request = receive(leader, Order).request
            if request is None:
                continue  # an order to stop that arrived after this node's report was sent
            log = job_folder / f"{Path(request.log or '').stem}.node{node_rank}.log"
            mine = request.on(node_rank=node_rank, gpus=servers.gpus, log=request.log and str(log))
            if unsupported is not None:
                rank = node_rank * (request.nproc_per_node or 1)
                unable = failed(Status.unsupported, "Unsupported", unsupported, rank=rank)
                report = NodeReport(unable=unable)
            else:
                report = _run_here(servers.get(request.checkout), mine, leader)
            send(leader, report)


def _run_here(server: ForkServer, request: Request, leader: Connection) -> NodeReport:
    """Execute this node's part of a run, until its ranks have ended or the leader stops them."""
    try:
        part = Part(server, request, float("inf"))  # the leader enforces the timeout
    except OSError as error:  # this node goes on, so that the run gets the true cause
        return NodeReport(unable=no_scratch(error))
    with part:
        while not part.child.ended and part.look():
            if part.ready([leader]):
                if receive(leader, Order).stacks:
                    part.child.stacks()
                break
        return part.report()
