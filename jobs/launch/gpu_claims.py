"""Claims of GPUs, so that no two submissions on this machine measure on one at the same time.

A claim is a Unix socket with an abstract name, the UUID of the GPU. The kernel frees the name when
the local queue and the worker that uses the GPU have ended, also if they are killed. Containers
with network namespaces of their own do not see each other's claims.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable

from jobs.provenance import gpu_uuid

POLL_S = 0.1
WAITS = "waiting for GPUs that another submission on this machine uses"
LONGEST = 107  # bytes of a socket's name; an index or UUID that no GPU has may be longer
Claims = dict[str, socket.socket]


def claim(gpus: Iterable[str], count: int) -> Claims | None:
    """Claim some of several GPUs. If other submissions hold too many, claim none: return None."""
    claims: Claims = {}
    for gpu in gpus:
        if len(claims) < count:
            name = f"\0cluster-sweeps-{gpu_uuid(gpu)}".encode(errors="replace")
            claims[gpu] = socket.socket(socket.AF_UNIX)
            try:
                claims[gpu].bind(name[:LONGEST])
            except OSError:  # another process holds it
                claims.pop(gpu).close()
    if len(claims) == count:
        return claims
    release(claims)
    return None


def release(claims: Claims) -> None:
    """End claims, unless another process also holds them."""
    for one in claims.values():
        one.close()
