"""Connections between the workers of a job with several nodes.

The worker on node 0, the leader, listens on one IP address and writes the address and a secret to a
file that only this user can read. The other workers, the followers, connect to it. Both ends first
prove that they know the secret. The messages after that are JSON, neither encrypted nor signed.
"""

from __future__ import annotations

import ipaddress
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import TypeVar

from jobs.whole_files import is_own, write_json
from jobs.worker.messages import Message

M = TypeVar("M", bound=Message)

MEET_S = 300.0  # maximum wait for the worker of another node to connect, in seconds
HANDSHAKE_S = 10.0  # maximum time to prove the knowledge of the secret, in seconds


def node_address() -> str:
    """Return an IP address of this node at which the other nodes of the job can reach it.

    This is an address of the name that Slurm uses for the node, of the host name, or the address
    from which srun was started, which is that of node 0. A loopback address is returned only if it
    is the name of the node itself: a host name often has one in /etc/hosts.
    """
    names = [
        os.environ.get("SLURMD_NODENAME"),
        socket.gethostname(),
        os.environ.get("SLURM_LAUNCH_NODE_IPADDR"),
    ]
    for name in filter(None, names):
        try:
            found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            continue
        for family, *_, address in found:
            ip = str(address[0])
            if _is_own(family, ip) and (ip == name or not ipaddress.ip_address(ip).is_loopback):
                return ip
    raise RuntimeError(
        "a job with several nodes needs an IP address of this node that the other nodes can reach, "
        f"got none for the names {', '.join(filter(None, names))}; see /etc/hosts"
    )


def _is_own(family: int, ip: str) -> bool:
    try:
        with socket.socket(family) as probe:
            probe.bind((ip, 0))
        return True
    except OSError:
        return False


def send(connection: Connection, message: Message) -> None:
    connection.send_bytes(message.encode())


def receive(connection: Connection, kind: type[M]) -> M:
    """Receive the next message. Raises ConnectionError, also if it is of another kind."""
    try:
        return kind.decode(connection.recv_bytes())
    except (EOFError, OSError, ValueError) as error:
        raise ConnectionError(str(error)) from None


def _prove(
    connected: socket.socket, key: bytes, *steps: Callable[[Connection, bytes], None]
) -> Connection:
    """Execute the steps of a handshake, in HANDSHAKE_S at most. A socket's timeout restarts."""

    def shut_down() -> None:
        with suppress(OSError):  # the other end has closed it
            connected.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(HANDSHAKE_S, shut_down)
    timer.daemon = True
    timer.start()
    try:
        connection = Connection(os.dup(connected.fileno()))
        for step in steps:
            step(connection, key)
        return connection
    finally:
        timer.cancel()


# ---- the leader ----------------------------------------------------------------------------------


def accept_workers(count: int, rendezvous_file: Path) -> list[Connection]:
    """Listen until the workers of all other nodes have connected, and return the connections.

    Each client is checked for the secret in a thread of its own, so that a silent one keeps no
    worker out. The file for address and secret is removed at the end. Raises RuntimeError if no
    worker connects for MEET_S.
    """
    host, key = node_address(), os.urandom(32)
    proven: queue.SimpleQueue[Connection] = queue.SimpleQueue()  # know the secret

    def check(client: socket.socket) -> None:
        # An error tells of a client that is not a worker of this job, such as a port scanner.
        with client, suppress(Exception):
            proven.put(_prove(client, key, deliver_challenge, answer_challenge))

    found: list[Connection] = []
    deadline = time.monotonic() + MEET_S
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family, backlog=128) as listener:
        listener.setblocking(False)
        where = {"host": host, "port": listener.getsockname()[1], "key": key.hex()}
        _write_secretly(rendezvous_file, where)
        try:
            while len(found) < count:
                try:
                    client, _ = listener.accept()
                    threading.Thread(target=check, args=(client,), daemon=True).start()
                except (OSError, RuntimeError):
                    # No client, or too many files or threads, until handshakes reach their limit.
                    time.sleep(0.05)
                if not proven.empty():
                    found.append(proven.get())
                    deadline = time.monotonic() + MEET_S
                elif time.monotonic() > deadline:
                    raise RuntimeError(
                        f"only {len(found)} of {count} other nodes connected to node 0, and none "
                        f"in the last {MEET_S:.0f} s; check that their workers started and can "
                        "reach node 0 by TCP"
                    )
        finally:
            rendezvous_file.unlink(missing_ok=True)
    return found


def _write_secretly(path: Path, value: object) -> None:
    previous = os.umask(0o077)  # with the secret, others could take the place of a node
    try:
        write_json(path, value)
    finally:
        os.umask(previous)


# ---- a follower ----------------------------------------------------------------------------------


def connect_to_leader(rendezvous_file: Path) -> Connection:
    """Connect to the worker on node 0. Raises RuntimeError if that fails for MEET_S."""
    deadline = time.monotonic() + MEET_S
    while True:
        try:
            os.listdir(rendezvous_file.parent)  # refreshes the cache of a network file system
            where = json.loads(_read_own(rendezvous_file))
            key = bytes.fromhex(where["key"])
            with socket.create_connection((where["host"], where["port"]), HANDSHAKE_S) as connected:
                connected.settimeout(None)
                return _prove(connected, key, answer_challenge, deliver_challenge)
        except (OSError, ValueError, EOFError, AuthenticationError, AssertionError) as error:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"could not connect to node 0 within {MEET_S:.0f} s ({error}); check that its "
                    f"worker started and that all nodes share {rendezvous_file.parent}"
                ) from None
            time.sleep(0.2)


def _read_own(path: Path) -> bytes:
    """Read a file of this user. Another user could name a server of their own in it."""
    with path.open("rb") as file:
        if not (is_own(path) and os.path.samestat(os.fstat(file.fileno()), path.stat())):
            raise PermissionError(f"{path} belongs to another user")
        return file.read()
