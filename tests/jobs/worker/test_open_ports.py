"""Sockets of runs with several ranks: which addresses listen, and what a stranger can do there."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge
from pathlib import Path

import pytest

from jobs.results.manifest import Executor
from jobs.worker.messages import Order
from jobs.worker.ranks import node_connections
from jobs.worker.ranks.node_connections import node_address, receive, send
from tests.jobs.harness import (
    PATIENCE_S,
    Fifo,
    await_true,
    only_record,
    start,
    write_submission,
    write_sweep,
)
from tests.jobs.open_ports import (
    Bomb,
    addresses_of_this_machine,
    attack,
    connect,
    is_loopback,
    listening,
)
from tests.jobs.worker.test_torchrun import start_node

SILENT = 100  # number of clients that connect and send nothing
LONG_S = 200  # timeout of the runs, in seconds


@pytest.mark.slow
def test_one_node_listens_only_on_loopback(tmp_path: Path) -> None:
    """No other machine can connect to a run of one node, and its store unpickles nothing."""
    fifo = Fifo(tmp_path / "fifo")
    # Both ranks wait while the agent polls its store. Rank 1 tells the FIFO.
    case = {"what": "pause", "rank": 1, "path": str(fifo.path), "gloo": True}
    shape = {"launch": {"nproc_per_node": 2}, "timeout_s": LONG_S}
    sweep = write_sweep(tmp_path, [case], **shape)
    queue = start("jobs.submit", sweep, "--local", "--out", tmp_path / "out")
    rank, _ = fifo.pids()
    found = listening(queue.pid)
    assert found and all(is_loopback(address) for address, _ in found)
    for address in addresses_of_this_machine():
        for _, port in found:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, port), PATIENCE_S)
    attack(rank, tmp_path / "bomb")
    fifo.release()
    queue.communicate(timeout=PATIENCE_S)
    assert only_record(tmp_path / "out").status == "ok"
    assert not (tmp_path / "bomb").exists()


class Nodes:
    """A job on two simulated nodes. The second worker starts when a test says so."""

    def __init__(self, folder: Path, fifo: Fifo):
        case = {"what": "pause", "rank": 1, "path": str(fifo.path)}
        self.out = folder / "out"
        manifest = write_submission(
            write_sweep(
                folder,
                [case],
                launch={"nproc_per_node": 1},
                resources={"nodes": 2, "gpus_per_node": 0},
                timeout_s=LONG_S,
            ),
            self.out,
            Executor.slurm,
        )
        self._manifest = manifest.path
        self.leader = start_node(manifest.path, 0)
        folder = manifest.job_folder(0)
        await_true(lambda: any(folder.glob("rendezvous-*")), "the leader listens")
        (self.file,) = folder.glob("rendezvous-*")
        where = json.loads(self.file.read_text())
        self.address, self.key = (where["host"], where["port"]), bytes.fromhex(where["key"])

    def join(self) -> subprocess.Popen[bytes]:
        return start_node(self._manifest, 1)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Nodes, Fifo]]:
    fifo = Fifo(tmp_path / "fifo")
    nodes = Nodes(tmp_path, fifo)
    yield nodes, fifo
    nodes.leader.terminate()
    nodes.leader.wait(PATIENCE_S)


@pytest.mark.slow
def test_two_nodes_listen_on_one_address_and_a_stranger_does_not_matter(
    nodes: tuple[Nodes, Fifo], tmp_path: Path
) -> None:
    """A client without the secret has no effect.

    test_slurm_interruptions.py also writes to the store of two nodes.
    """
    job, fifo = nodes
    assert job.file.stat().st_mode & 0o077 == 0
    assert listening(job.leader.pid) == {job.address} and job.address[0] == "127.0.0.2"
    with connect(job.address) as liar:
        connection = Connection(os.dup(liar.fileno()))
        with pytest.raises(AuthenticationError):
            answer_challenge(connection, b"a guess")
        with pytest.raises((EOFError, ConnectionError)):
            connection.send(Bomb(tmp_path / "bomb"))
            connection.recv()
    follower = job.join()
    fifo.pids()
    addresses = {address for address, _ in listening(job.leader.pid) | listening(follower.pid)}
    assert addresses == {"127.0.0.2"}
    with pytest.raises(ConnectionRefusedError):  # all workers have connected
        connect(job.address)
    fifo.release()
    assert (follower.wait(PATIENCE_S), job.leader.wait(PATIENCE_S)) == (0, 0)
    assert only_record(job.out).status == "ok"
    assert not (tmp_path / "bomb").exists()


def test_silent_clients_keep_no_worker_out_and_one_with_the_secret_executes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "127.0.0.2")
    file = tmp_path / "rendezvous.json"
    with ThreadPoolExecutor(2) as pool, ExitStack() as silent:
        leader = pool.submit(node_connections.accept_workers, 1, file)
        await_true(file.exists, "the leader listens")
        where = json.loads(file.read_text())
        for _ in range(SILENT):
            silent.enter_context(connect((where["host"], where["port"])))
        follower = pool.submit(node_connections.connect_to_leader, file).result(PATIENCE_S)
        (connection,) = leader.result(PATIENCE_S)
        with connection, follower:
            send(connection, Order(what="end"))
            assert receive(follower, Order).what == "end"
            follower.send(Bomb(tmp_path / "bomb"))  # a pickle
            with pytest.raises(ConnectionError):
                receive(connection, Order)
    assert not (tmp_path / "bomb").exists()


def test_a_handshake_has_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise silent clients would take all open files of a worker."""
    monkeypatch.setattr(node_connections, "HANDSHAKE_S", 0.2)
    monkeypatch.setenv("SLURMD_NODENAME", "127.0.0.2")
    file = tmp_path / "rendezvous.json"
    with ThreadPoolExecutor(1) as pool:
        leader = pool.submit(node_connections.accept_workers, 1, file)
        await_true(file.exists, "the leader listens")
        where = json.loads(file.read_text())
        with connect((where["host"], where["port"])) as silent:
            silent.settimeout(PATIENCE_S)
            while silent.recv(1000):  # the challenge, and then the end
                pass
        node_connections.connect_to_leader(file).close()
        leader.result(PATIENCE_S)[0].close()


@pytest.mark.parametrize(
    ("name", "expected"), [("127.0.0.3", "127.0.0.3"), ("localhost", None), ("nowhere.", None)]
)
def test_a_loopback_address_is_used_only_if_it_is_the_name_of_the_node(
    monkeypatch: pytest.MonkeyPatch, name: str, expected: str | None
) -> None:
    """Debian maps the host name to 127.0.1.1, which the other nodes of a job cannot reach."""
    monkeypatch.setenv("SLURMD_NODENAME", name)
    monkeypatch.delenv("SLURM_LAUNCH_NODE_IPADDR", raising=False)
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    if expected is None:
        with pytest.raises(RuntimeError, match=f"got none for the names {name}"):
            node_address()
    else:
        assert node_address() == expected
