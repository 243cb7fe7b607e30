"""Messages between the processes of a job: requests to execute a run, and how it ended.

A message is one JSON object, in a file or on a connection between two nodes. It is validated when
it is read, and nothing is unpickled, so whoever can send one cannot execute code.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict

from jobs.results.record import Failure
from jobs.status import Status
from jobs.whole_files import whole_file


class Message(BaseModel):
    model_config = ConfigDict(frozen=True)

    def encode(self) -> bytes:
        # pydantic's own serializer rejects lone surrogates, which a path may contain.
        return json.dumps(dict(self), default=dict).encode()

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Raises ValueError if the data are no such message."""
        return cls.model_validate(json.loads(data))

    def write(self, path: Path) -> None:
        with whole_file(path) as file:
            file.write(self.encode())

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls.decode(path.read_bytes())


class Request(Message):
    """One attempt to execute a run, for the processes that execute it."""

    benchmark: str
    version: int  # version of the benchmark at submission
    params: dict[str, Any]
    gpus: list[str]  # indices or UUIDs of the GPUs that the run may use; empty: CPU run
    artifacts: str  # folder for the run's files, shared by all nodes; created by `artifacts_folder`
    token: str  # identifies the attempt to the torchrun agents of all nodes
    asked_at: float  # start of the attempt on node 0's monotonic clock, in seconds
    log: str | None = None  # file for stdout and stderr; None: the terminal
    scratch: str = ""  # folder on this node for outcomes and stacks; removed after the run
    checkout: str = ""  # name of another checkout of the code; empty: the present code
    # What this round of a block includes, see `systems.benchmark.round_options`. None: no block.
    round_options: dict[str, Any] | None = None
    # For runs of several processes (jobs.worker.torchrun):
    nproc_per_node: int | None = None
    nodes: int = 1
    node_rank: int = 0
    host: str = "127.0.0.1"  # IP address of node 0, on which the rendezvous listens
    endpoint: str | None = None  # host:port of the rendezvous; None: node 0, which opens it
    agent: int | None = None  # pid of the torchrun agent, which starts this node's ranks

    @property
    def world_size(self) -> int:
        return self.nodes * (self.nproc_per_node or 1)

    def on(self, **changes: Any) -> Request:
        return self.model_copy(update=changes)


class Outcome(Message):
    """Outcome of a run or of one of its ranks: measurements if ok, otherwise a failure."""

    status: Status
    measurements: dict[str, Any] | None = None  # dict that the benchmark returned
    failure: Failure | None = None
    # Set only if the process that called the benchmark wrote this outcome:
    starting: float | None = None  # from the start of the attempt to the call of run(), in seconds
    measuring: float | None = None  # time inside run(), in seconds
    ended_at: float = 0.0  # in seconds since the epoch
    versions: dict[str, Any] = {}  # versions of the libraries that were loaded
    # Start and end of the windows in which each phase was measured, on the monotonic clock.
    windows: dict[str, list[tuple[float, float]]] = {}
    rank: int = 0
    lost_peer: bool = False  # whether a collective failed, as when another rank ends

    @property
    def is_ok(self) -> bool:
        return self.status is Status.ok


class RankFailure(Message):
    """A rank that failed, as torchrun's agent reports it."""

    rank: int
    exit_code: int  # negative: number of the signal that killed the rank
    at: float  # time of the failure, in seconds since the epoch


class AgentReport(Message):
    """Report of the torchrun agent, i.e. of the process that starts the ranks on one node."""

    failures: list[RankFailure] = []
    error: str | None = None  # error of the agent itself

    @property
    def is_ok(self) -> bool:
        return not self.failures and self.error is None


class NodeReport(Message):
    """Result of one run on one node: what its processes reported, and how they ended."""

    exit_code: int = 0  # of the agent or of the only process; 0 if it was stopped, or unknown
    agent: AgentReport | None = None  # None: there was no agent, or it ended without a report
    outcomes: list[Outcome] = []
    stacks: str = ""  # stacks of the processes at a hang or crash
    log_end: str = ""  # last part of the log
    out_of_memory: bool = False  # whether the OOM killer killed a process of the job
    unable: Outcome | None = None  # of the run, if this node could not execute or report its part

    @property
    def is_ok(self) -> bool:
        return self.agent is not None and self.agent.is_ok


class Order(Message):
    """What the worker on node 0 tells the workers of the other nodes: to run, or to stop a run."""

    request: Request | None = None  # None: stop
    stacks: bool = False  # whether the processes write their stacks before they stop
