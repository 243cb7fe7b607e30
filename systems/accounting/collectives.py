"""Collectives on a ring: bytes that each rank sends, and time.

n ranks stand in a ring, each sends W bytes/s to the next. A tensor of S bytes is cut into n chunks,
and in every step each rank passes one chunk on; the time of a call itself is left out. Sources:
Stanford CS336 2026, assignment 2, section 8.1; Austin et al. 2025, How to Scale Your Model, part 12
("Intra-node collectives").
"""

from __future__ import annotations

from systems.accounting.hardware import link_bandwidth


def ring_bytes(size_bytes: float, world_size: float) -> float:
    """Return the bytes each rank sends to all-gather or to reduce-scatter: S (n-1)/n.

    Args:
        size_bytes: S, of the whole tensor.
        world_size: n, at least 1; not an integer where a limit is solved for.

    Raises:
        ValueError: world_size is less than 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size: given {world_size}, expected at least 1")
    return size_bytes * (world_size - 1) / world_size


def all_gather_seconds(size_bytes: float, world_size: float, bandwidth: float) -> float:
    """Return S (n-1) / (n W): n-1 steps of a chunk of S/n bytes.

    Args:
        size_bytes, world_size: as for `ring_bytes`.
        bandwidth: W, bytes/s that one rank sends.
    """
    return ring_bytes(size_bytes, world_size) / bandwidth


def reduce_scatter_seconds(size_bytes: float, world_size: float, bandwidth: float) -> float:
    """Return S (n-1) / (n W): an all-gather run backwards, adding. Arguments as there."""
    return ring_bytes(size_bytes, world_size) / bandwidth


def all_reduce_seconds(size_bytes: float, world_size: float, bandwidth: float) -> float:
    """Return 2 S (n-1) / (n W): a reduce-scatter, then an all-gather of what it left."""
    scatter = reduce_scatter_seconds(size_bytes, world_size, bandwidth)
    return scatter + all_gather_seconds(size_bytes, world_size, bandwidth)


def whole_tensor_all_reduce_seconds(
    size_bytes: float, world_size: float, bandwidth: float
) -> float:
    """Return S (n-1) / W, the alternate ring all-reduce of assignment 2, section 8.1: in each of
    n-1 steps a rank passes on the whole tensor that it received in the last step, and adds it to
    its own sum. That is n/2 times as long as `all_reduce_seconds`.
    """
    return world_size * ring_bytes(size_bytes, world_size) / bandwidth


def all_reduce_bus_bytes(size_bytes: int, world_size: int) -> float:
    """Return the bytes each rank sends, and receives, to all-reduce: 2 S (n-1)/n.

    Divided by time this is nccl-tests' bus bandwidth, which can be compared with the link's speed
    whatever the number of ranks (nccl-tests, doc/PERFORMANCE.md, "AllReduce").
    """
    return 2 * ring_bytes(size_bytes, world_size)


def predicted_all_reduce_seconds(
    device_name: str | None, size_bytes: float, world_size: int
) -> float | None:
    """Return `all_reduce_seconds` over the device's link, or None if it is unknown.

    Args:
        device_name: as `hardware.link_bandwidth` takes it; every rank on one such link.
    """
    bandwidth = link_bandwidth(device_name)
    return None if bandwidth is None else all_reduce_seconds(size_bytes, world_size, bandwidth)
