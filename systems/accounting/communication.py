"""Collectives: what each rank must send."""

from __future__ import annotations


def all_reduce_bus_bytes(size_bytes: int, world_size: int) -> float:
    """Bytes each rank must send, and receive, to all-reduce `size_bytes`: 2 (n-1)/n of them.

    Divided by time this is nccl-tests' bus bandwidth, which can be compared with the link's speed
    whatever the number of ranks (nccl-tests, doc/PERFORMANCE.md, "AllReduce").
    """
    if world_size < 1:
        raise ValueError(f"world_size: given {world_size}, expected at least 1")
    return size_bytes * 2 * (world_size - 1) / world_size
