"""Rendezvous of the torchrun agents of one run: one agent per node, whose ranks are known.

torchrun's own rendezvous agrees on the ranks of nodes that may come and go. It listens on all
network interfaces, and it unpickles what any client writes to its store. Whoever reaches its port
can thus execute code. Here, the worker tells each agent its rank and the address of the store, so
nothing is unpickled. The store listens on one address, which is a loopback address if the job has
one node. The ranks use the same store for `torch.distributed.init_process_group`.

This module imports torch. Only agents import it.
"""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "known_ranks"  # name under which torchrun finds the class
JOIN_S = 120.0  # maximum wait for the store, and for the agents of the other nodes, in seconds


def open_store(host: str) -> TCPStore:
    """Open a store that listens only on the IP address `host`, on a free port.

    Without a socket that is already bound, TCPStore would listen on all interfaces.
    """
    family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    return TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


class KnownRanks(RendezvousHandler):
    """Rendezvous of agents that know their rank, the number of nodes and the store."""

    def __init__(self, parameters: RendezvousParameters):
        self._run_id = parameters.run_id
        self._rank = int(parameters.config["rank"])
        self._nodes = parameters.min_nodes
        host, _, port = parameters.endpoint.rpartition(":")
        self._address = RendezvousStoreInfo(host, int(port))

    def next_rendezvous(self) -> RendezvousInfo:
        address = self._address
        store = TCPStore(
            address.master_addr,
            address.master_port,
            is_master=False,
            timeout=timedelta(seconds=JOIN_S),
        )
        return RendezvousInfo(PrefixStore("agents", store), self._rank, self._nodes, address)

    @property
    def use_agent_store(self) -> bool:
        """Whether the ranks use this store. If not, rank 0 would open another one."""
        return True

    def get_backend(self) -> str:
        return BACKEND

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0  # no node joins later

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


rendezvous_handler_registry.register(BACKEND, KnownRanks)
