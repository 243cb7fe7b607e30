"""torchrun on one node: its agent starts the ranks of a run, and reports which of them failed.

For each run node 0's agent opens the rendezvous store on a port of the system's choice, so no port
is fixed and none is picked before it is bound. `nodes` brings the nodes of a job together.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from jobs.json_files import write_json
from jobs.worker.isolation import Child, oom_kills, read_stacks
from jobs.worker.outcome import AgentReport, NodeReport, Outcome, RankFailure
from jobs.worker.run_process import Request, become_run, watch_stacks

LOG_END = 2000  # bytes of a log that may tell how its process ended


def agent(request: Request) -> None:
    """The main function of a node's torchrun agent: starts the ranks, waits, reports failures.

    Writes agent.json to the scratch folder: the ranks that failed, with exit codes.
    """
    become_run(request)
    scratch = Path(request.scratch)
    watch_stacks(scratch / "stack-agent.txt")
    try:
        report = AgentReport(failures=_launch(request))
    except Exception as error:
        report = AgentReport(error=f"{type(error).__name__}: {error}")
    report.write(scratch / "agent.json")


def _launch(request: Request) -> list[RankFailure]:
    """Run the ranks of this node to their end; returns those that failed."""
    assert request.nproc_per_node is not None
    from torch.distributed import TCPStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    scratch = Path(request.scratch)
    store = None
    endpoint = request.endpoint
    if endpoint is None:
        store = TCPStore(request.host, 0, is_master=True, wait_for_workers=False)
        endpoint = f"{request.host}:{store.port}"
        write_json(scratch / "endpoint.json", endpoint)
    # As torchrun does when it is not told: the ranks share the cores.
    share = len(os.sched_getaffinity(0)) // request.nproc_per_node
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))
    config = LaunchConfig(
        min_nodes=request.nodes,
        max_nodes=request.nodes,
        nproc_per_node=request.nproc_per_node,
        run_id=request.token,
        rdzv_backend="c10d",
        rdzv_endpoint=endpoint,
        rdzv_configs={"is_host": False, "timeout": 120},
        max_restarts=0,
        local_addr=request.host,
        logs_specs=DefaultLogsSpecs(log_dir=str(scratch / "torchrun")),  # else it stays in /tmp
    )
    request_path = replace(request, agent=os.getpid()).dump(scratch / "request.json")
    command = ["-u", "-m", "jobs.worker.run_process", str(request_path)]
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        return [
            RankFailure(rank=rank, exit_code=failure.exitcode, at=failure.timestamp)
            for rank, failure in error.failures.items()
        ]
    finally:
        del store
    return []


def collect(request: Request, kills: int, child: Child) -> NodeReport:
    """End a node's agent and ranks where they have not ended, and read what they left.

    Args:
        kills: `oom_kills()` before they started.
    """
    exit_code = child.exit_code if child.ended else 0
    child.kill()
    scratch = Path(request.scratch)
    report = scratch / "agent.json"
    return NodeReport(
        token=request.token,
        exit_code=exit_code,
        agent=AgentReport.read(report) if report.exists() else None,
        outcomes=outcomes_in(scratch),
        stacks=read_stacks(scratch),
        log_end=log_end(request.log),
        out_of_memory=oom_kills() > kills,
        lost="ServerDied" if child.lost else None,
    )


def outcomes_in(scratch: Path) -> list[Outcome]:
    return [Outcome.read(path) for path in sorted(scratch.glob("outcome*.json"))]


def log_end(path: str | None) -> str:
    """The last lines of a run's output: of an abort they are all there is."""
    try:
        with open(path or os.devnull, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - LOG_END))
            return file.read().decode(errors="replace").strip()
    except OSError:
        return ""
