"""Runs of several processes: torchrun on each node of the job, one rendezvous, one verdict.

On each node a worker runs. Node 0's leads: it opens a socket on a port the system picks, publishes
its address in the job's folder, and tells the others what to launch and when to stop. For each run
node 0's agent opens the rendezvous store, again on a port of the system's choice, so no port is
fixed and none is picked before it is bound.
"""

from __future__ import annotations

import json
import multiprocessing.connection
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from jobs.isolation import EXIT_S, Child, ForkServer, ask_for_stacks, read_stacks
from jobs.record import write_json
from jobs.run_process import Request, become_child, watch_stacks

MEET_S = 300.0  # for the other nodes' workers to appear
CONSEQUENCES_S = 3.0  # for the other nodes to say how they ended, once one has failed


def agent(request: Request, port_pipe: Connection | None) -> None:
    """The main function of a node's torchrun agent: starts the ranks, waits, reports failures.

    Writes agent.json to the scratch folder: the ranks that failed, with exit codes.
    """
    become_child(request)
    scratch = Path(request.scratch)
    watch_stacks(scratch / "stack.txt")
    report: dict[str, Any] = {"failures": [], "error": None}
    try:
        _launch(request, port_pipe, report)
    except Exception as error:
        report["error"] = f"{type(error).__name__}: {error}"
    write_json(scratch / "agent.json", report)


def _launch(request: Request, port_pipe: Connection | None, report: dict[str, Any]) -> None:
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    assert request.nproc_per_node is not None
    store = None
    endpoint = request.endpoint
    if endpoint is None:
        store = dist.TCPStore(request.host, 0, is_master=True, wait_for_workers=False)
        endpoint = f"{request.host}:{store.port}"
        assert port_pipe is not None
        port_pipe.send(endpoint)
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
    )
    request_path = request.dump(Path(request.scratch) / "request.json")
    command = ["-u", "-m", "jobs.run_process", str(request_path)]
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        report["failures"] = [
            {"rank": rank, "exit_code": failure.exitcode, "at": failure.timestamp}
            for rank, failure in error.failures.items()
        ]
    del store


def node_address() -> str:
    """The address by which other nodes of the job reach this one."""
    candidates = [os.environ.get("SLURMD_NODENAME"), socket.gethostname()]
    for name in candidates:
        try:
            if name:
                socket.getaddrinfo(name, None)
                return name
        except socket.gaierror:
            continue
    return "127.0.0.1"


def start_agent(server: ForkServer, request: Request) -> tuple[Child, Connection | None]:
    """Start this node's agent; the connection yields the endpoint, where it opens the store."""
    if request.endpoint is not None:
        return server.start(agent, request, None), None
    receiver, sender = server.pipe()
    child = server.start(agent, request, sender)
    sender.close()
    return child, receiver


def collect(scratch: Path) -> dict[str, Any]:
    """What a node's agent and ranks left in its scratch folder."""

    def read(path: Path) -> Any:
        return json.loads(path.read_text()) if path.exists() else None

    outcomes = [read(path) for path in sorted(scratch.glob("outcome*.json"))]
    return {
        "agent": read(scratch / "agent.json"),
        "outcomes": outcomes,
        "stacks": read_stacks(scratch),
    }


class Followers:
    """The leader's side: connections to the workers of the other nodes."""

    def __init__(self, count: int, meeting: Path):
        key = os.urandom(16)
        self._listener = Listener(("0.0.0.0", 0), authkey=key)
        port = self._listener.address[1]
        meeting.parent.mkdir(parents=True, exist_ok=True)
        previous = os.umask(0o077)  # the key lets a process launch commands as this user
        try:
            write_json(meeting, {"host": node_address(), "port": port, "key": key.hex()})
        finally:
            os.umask(previous)
        self.connections: list[Connection] = []
        self._accept(count)
        meeting.unlink(missing_ok=True)

    def _accept(self, count: int) -> None:
        # Listener has no timeout of its own: set it on the socket it holds.
        self._listener._listener._socket.settimeout(MEET_S)  # type: ignore[attr-defined]
        while len(self.connections) < count:
            try:
                self.connections.append(self._listener.accept())
            except multiprocessing.AuthenticationError:
                continue  # a stranger
            except TimeoutError:
                found = len(self.connections)
                raise RuntimeError(
                    f"{found} of {count} other nodes appeared within {MEET_S:.0f} s"
                ) from None

    def send(self, message: tuple[Any, ...]) -> None:
        for connection in self.connections:
            try:
                connection.send(message)
            except OSError:
                continue  # its end shows when it is waited for

    def close(self) -> None:
        self.send(("end",))
        for connection in self.connections:
            connection.close()
        self._listener.close()


def follow(meeting: Path, node_rank: int, preload: list[str], job_folder: Path) -> None:
    """The main loop of the workers of nodes 1, 2, …: launch what the leader says, report back."""
    deadline = time.monotonic() + MEET_S
    while True:
        try:
            os.listdir(meeting.parent)  # makes a network file system look again
            where = json.loads(meeting.read_text())
            leader = Client((where["host"], where["port"]), authkey=bytes.fromhex(where["key"]))
            break
        except (OSError, ValueError, EOFError):
            if time.monotonic() > deadline:
                raise RuntimeError(f"node 0 did not appear within {MEET_S:.0f} s") from None
            time.sleep(0.2)
    server = ForkServer(preload)
    while True:
        try:
            message = leader.recv()
        except (EOFError, OSError):
            return  # the leader is gone, and so is the job
        if message[0] == "end":
            return
        if message[0] != "run":
            continue  # an order to stop that crossed this node's report
        request: Request = message[1]
        scratch = Path(tempfile.mkdtemp(prefix="run-"))
        log = None
        if request.log is not None:
            log = str(job_folder / f"{Path(request.log).stem}.node{node_rank}.log")
        mine = replace(
            request, scratch=str(scratch), node_rank=node_rank, host=node_address(), log=log
        )
        child, _ = start_agent(server, mine)
        try:
            while not child.ended:
                ready = multiprocessing.connection.wait([child.sentinel, leader], 60.0)
                if leader in ready:
                    try:
                        order = leader.recv()[0]
                    except (EOFError, OSError):
                        return
                    if order == "stacks":
                        ask_for_stacks(child, request.token, scratch)
                    break
            child.kill(request.token)
            leader.send(collect(scratch))
        finally:
            child.kill(request.token)
            shutil.rmtree(scratch, ignore_errors=True)


def lead(
    server: ForkServer,
    request: Request,
    followers: Followers | None,
    timeout_s: float,
    on_start: Callable[[Child], None],
) -> dict[str, Any]:
    """Run the ranks of one run on every node of the job.

    Returns:
        timed_out, stacks, and nodes: what each node left (`collect`), node 0 first.
    """
    deadline = time.monotonic() + timeout_s
    scratch = Path(request.scratch)
    child, pipe = start_agent(server, request)
    on_start(child)
    others = list(followers.connections) if followers else []
    reports: list[dict[str, Any]] = []
    timed_out = failed = False
    try:
        if others:
            assert pipe is not None and followers is not None
            endpoint = None
            if multiprocessing.connection.wait([pipe, child.sentinel], timeout_s):
                try:
                    endpoint = pipe.recv()
                except (EOFError, OSError):
                    endpoint = None  # the agent died first; its end tells
            if endpoint is None:
                others = []
            else:
                followers.send(("run", replace(request, endpoint=endpoint)))
        waiting: set[Any] = {child.sentinel, *others}
        while waiting:
            ready = multiprocessing.connection.wait(
                list(waiting), max(0, deadline - time.monotonic())
            )
            if not ready:
                break
            for one in ready:
                waiting.discard(one)
                if one == child.sentinel:
                    report = collect(scratch)
                else:
                    report = _receive(one)
                    reports.append(report)
                failed = failed or not _went_well(report)
            if failed:  # the other nodes' ranks may hang for ever: give them a moment, then stop
                deadline = min(deadline, time.monotonic() + CONSEQUENCES_S)
        timed_out = bool(waiting) and not failed
        late = [one for one in waiting if one != child.sentinel]
        for connection in late:
            try:
                connection.send(("stacks" if timed_out else "stop",))
            except OSError:
                continue
        if timed_out and not child.ended:
            ask_for_stacks(child, request.token, scratch)
        for connection in late:
            if connection.poll(EXIT_S + 5):
                reports.append(_receive(connection))
    finally:
        child.kill(request.token)
        if pipe is not None:
            pipe.close()
    nodes = [collect(scratch), *reports]
    stacks = "\n\n".join(node["stacks"] for node in nodes if node["stacks"])
    return {"timed_out": timed_out, "stacks": stacks, "nodes": nodes}


def _receive(connection: Connection) -> dict[str, Any]:
    try:
        return connection.recv()  # type: ignore[no-any-return]
    except (EOFError, OSError):
        return {
            "agent": {"failures": [], "error": "a node's worker is gone"},
            "outcomes": [],
            "stacks": "",
        }


def _went_well(report: dict[str, Any]) -> bool:
    told = report["agent"]
    return told is not None and not told["failures"] and told["error"] is None
