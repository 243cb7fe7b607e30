"""torchrun on one node: an agent process forks the ranks of the node.

For each run, the agent of node 0 opens the store through which agents and ranks find each other, on
a free port that the system picks. The module `nodes` coordinates the nodes of a job.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

from jobs.results.unwritable import FULL
from jobs.whole_files import write_json
from jobs.worker.messages import AgentReport, RankFailure, Request
from jobs.worker.run_process import become_run, run_rank
from jobs.worker.scratch import AGENT, deliver, failure_file, leave_error, watch_stacks

LOOPBACK = "lo"  # network interface that only processes on this machine can reach
JOIN_S = 120  # maximum wait for the agents of the other nodes, in seconds


def agent(request: Request) -> None:
    """Start and watch the ranks of a run on this node: the main function of the agent."""
    become_run(request)
    scratch = Path(request.scratch)
    watch_stacks(scratch / "stack-agent.txt")
    try:
        _launch(request)
        report = AgentReport()
    except Exception as error:
        report = AgentReport(error=f"{type(error).__name__}: {error}")
        if isinstance(error, OSError) and error.errno in FULL:  # torchrun writes there, too
            leave_error(scratch, error)
    deliver(report, scratch / AGENT)


def _launch(request: Request) -> None:
    """Start the ranks of this node, and wait until they end."""
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
        start_method="fork",  # the ranks share what this process has imported
        # By default, torchrun would leave a folder in /tmp, and files if this process is killed.
        logs_specs=DefaultLogsSpecs(log_dir=str(scratch / "torchrun")),
    )
    tempfile.tempdir = str(scratch)
    # To log that a rank has failed, with a traceback, torch would import torch._dynamo for seconds.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        elastic_launch(config, run_rank)(request)
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            path = failure_file(scratch, rank)
            if not path.exists():  # `run_rank` was killed before it told how the rank failed
                found = RankFailure(rank=rank, exit_code=failure.exitcode, at=failure.timestamp)
                deliver(found, path)
    finally:
        del store


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
