"""torchrun on one node: an agent process starts the ranks of the node and reports failed ranks.

For each run, the agent of node 0 opens the store through which agents and ranks find each other, on
a free port that the system picks. The module `nodes` coordinates the nodes of a job.
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path
from typing import Any

from jobs.results.unwritable import FULL
from jobs.whole_files import write_json
from jobs.worker.messages import AgentReport, RankFailure, Request
from jobs.worker.run_process import become_run
from jobs.worker.scratch import AGENT, deliver, leave_error, watch_stacks

LOOPBACK = "lo"  # network interface that only processes on this machine can reach
JOIN_S = 120  # maximum wait for the agents of the other nodes, in seconds


def agent(request: Request) -> None:
    """Start and watch the ranks of a run on this node: the main function of the agent."""
    become_run(request)
    scratch = Path(request.scratch)
    watch_stacks(scratch / "stack-agent.txt")
    try:
        report = AgentReport(failures=_launch(request))
    except Exception as error:
        report = AgentReport(error=f"{type(error).__name__}: {error}")
        if isinstance(error, OSError) and error.errno in FULL:  # torchrun writes there, too
            leave_error(scratch, error)
    deliver(report, scratch / AGENT)


def _launch(request: Request) -> list[RankFailure]:
    """Start the ranks of this node, wait until they end, and return those that failed."""
    assert request.nproc_per_node is not None
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    scratch = Path(request.scratch)
    store, endpoint = None, request.endpoint
    if endpoint is None:
        store = _open_store(request.host)
        endpoint = f"{request.host}:{store.port}"
        write_json(scratch / "endpoint.json", endpoint)
    if request.nodes == 1:  # do not listen where other machines can connect
        os.environ |= {"GLOO_SOCKET_IFNAME": LOOPBACK, "NCCL_SOCKET_IFNAME": LOOPBACK}
    config = LaunchConfig(
        min_nodes=request.nodes,
        max_nodes=request.nodes,
        nproc_per_node=request.nproc_per_node,
        run_id=request.token,
        # torchrun's other rendezvous unpickle what any client writes to their store.
        rdzv_backend="static",
        rdzv_endpoint=endpoint,
        rdzv_configs={"rank": request.node_rank, "timeout": JOIN_S},
        max_restarts=0,
        # By default, torchrun would leave a folder in /tmp.
        logs_specs=DefaultLogsSpecs(log_dir=str(scratch / "torchrun")),
    )
    path = scratch / "request.json"
    request.on(agent=os.getpid()).write(path)
    try:
        launch = elastic_launch(config, sys.executable)
        launch("-u", "-m", "jobs.worker.run_process", str(path))
    except ChildFailedError as error:
        return [
            RankFailure(rank=rank, exit_code=failure.exitcode, at=failure.timestamp)
            for rank, failure in error.failures.items()
        ]
    finally:
        del store
    return []


def _open_store(host: str) -> Any:
    """Open a TCPStore that listens only on the IP address `host`, on a free port.

    Without a socket that is already bound, TCPStore would listen on all interfaces. The rendezvous
    of this process finds the store by its port (multi_tenant), and opens no other.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    return TCPStore(
        host,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
        multi_tenant=True,
    )
