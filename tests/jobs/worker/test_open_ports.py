"""Sockets of runs with several ranks: which addresses listen, and what a stranger can do there."""

from __future__ import annotations

import json
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge
from pathlib import Path

import pytest

from jobs.worker.messages import Order
from jobs.worker.ranks import node_connections
from jobs.worker.ranks.node_connections import node_address, receive, send
from tests.jobs.harness import PATIENCE_S, Fifo, await_true, only_record, start, write_sweep
from tests.jobs.open_ports import Bomb, attack, connect, is_loopback, listening

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
    attack(rank, tmp_path / "bomb")
    fifo.release()
    queue.communicate(timeout=PATIENCE_S)
    assert only_record(tmp_path / "out").status == "ok"
    assert not (tmp_path / "bomb").exists()


def test_a_stranger_keeps_no_worker_out_and_one_with_the_secret_executes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """test_slurm_interruptions.py tests which addresses of two nodes listen."""
    monkeypatch.setenv("SLURMD_NODENAME", "127.0.0.2")
    file = tmp_path / "rendezvous.json"
    with ThreadPoolExecutor(2) as pool, ExitStack() as silent:
        leader = pool.submit(node_connections.accept_workers, 1, file)
        await_true(file.exists, "the leader listens")
        assert file.stat().st_mode & 0o077 == 0
        where = json.loads(file.read_text())
        address = (where["host"], where["port"])
        assert address[0] == "127.0.0.2" and address in listening(os.getpid())
        for _ in range(SILENT):
            silent.enter_context(connect(address))
        with connect(address) as liar:
            connection = Connection(os.dup(liar.fileno()))
            with pytest.raises(AuthenticationError):
                answer_challenge(connection, b"a guess")
            with pytest.raises((EOFError, ConnectionError)):
                connection.send(Bomb(tmp_path / "bomb"))
                connection.recv()
        follower = pool.submit(node_connections.connect_to_leader, file).result(PATIENCE_S)
        (connection,) = leader.result(PATIENCE_S)
        with pytest.raises(ConnectionRefusedError):  # all workers have connected
            connect(address)
        with connection, follower:
            send(connection, Order(stacks=True))
            assert receive(follower, Order).stacks
            follower.send(Bomb(tmp_path / "bomb"))  # a pickle
            with pytest.raises(ConnectionError):
                receive(connection, Order)
    assert not (tmp_path / "bomb").exists()


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
