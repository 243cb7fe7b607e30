"""Bytes that each rank sends in ring collectives, and their time.

n ranks form a ring in which each sends W bytes/s to the next. A tensor of S bytes is cut into n
chunks, and in every step each rank sends one chunk. The fixed cost of a call is not counted.

Sources: Stanford CS336 2026, assignment 2, section 8.1; Austin et al. 2025, How to Scale Your
Model, part 12 ("Intra-node collectives").
"""

from __future__ import annotations

from systems.accounting.hardware import link_bandwidth


def ring_bytes(size_bytes: float, world_size: float) -> float:
    """Return the bytes that each rank sends in an all-gather or a reduce-scatter: S (n-1)/n.

    Args:
        size_bytes: size S of the whole tensor, in bytes.
        world_size: number of ranks n, at least 1. May be fractional, for solving for a limit.

    Raises:
        ValueError: if world_size is less than 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    return size_bytes * (world_size - 1) / world_size


def all_gather_seconds(size_bytes: float, world_size: float, bandwidth: float) -> float:
    """Return the seconds of an all-gather, S (n-1) / (n W): n-1 steps, each sends S/n bytes.

    Args:
        size_bytes, world_size: as for `ring_bytes`.
        bandwidth: W, in bytes/s that one rank sends.
    """
    return ring_bytes(size_bytes, world_size) / bandwidth


def reduce_scatter_seconds(size_bytes: float, world_size: float, bandwidth: float) -> float:
    """Return the seconds of a reduce-scatter, S (n-1) / (n W), the same as of an all-gather.

    Takes the arguments of `all_gather_seconds`.
    """
    return ring_bytes(size_bytes, world_size) / bandwidth


def all_reduce_seconds(size_bytes: float, world_size: float, bandwidth: float) -> float:
    """Return the seconds of an all-reduce, 2 S (n-1) / (n W): a reduce-scatter and an all-gather.

    Takes the arguments of `all_gather_seconds`.
    """
    scatter = reduce_scatter_seconds(size_bytes, world_size, bandwidth)
    return scatter + all_gather_seconds(size_bytes, world_size, bandwidth)


def whole_tensor_all_reduce_seconds(
    size_bytes: float, world_size: float, bandwidth: float
) -> float:
    """Return the seconds of an all-reduce that sends whole tensors around the ring, S (n-1) / W.

    This is the alternate ring all-reduce of CS336, assignment 2, section 8.1. In each of n-1 steps,
    a rank forwards the whole tensor that it received in the previous step and adds it to its sum.
    It takes n/2 times as long as `all_reduce_seconds`, whose arguments it takes.
    """
    return world_size * ring_bytes(size_bytes, world_size) / bandwidth


def all_reduce_bus_bytes(size_bytes: int, world_size: int) -> float:
    """Return the bytes that each rank sends (and receives) in an all-reduce: 2 S (n-1)/n.

    Divided by the time this is the bus bandwidth of nccl-tests, which is comparable with the
    bandwidth of the link for any number of ranks (nccl-tests, doc/PERFORMANCE.md, "AllReduce").
    """
    return 2 * ring_bytes(size_bytes, world_size)


def predicted_all_reduce_seconds(
    device_name: str | None, size_bytes: float, world_size: int
) -> float | None:
    """Return the seconds of an all-reduce over the link of a device, or None if it is unknown.

    Args:
        device_name: name of the device in `hardware`; each rank has one such device.
        size_bytes, world_size: as for `ring_bytes`.
    """
    bandwidth = link_bandwidth(device_name)
    return None if bandwidth is None else all_reduce_seconds(size_bytes, world_size, bandwidth)
