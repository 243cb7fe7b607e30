"""Number of bytes that each rank sends in ring collectives, and time of the collectives.

In a ring collective, each rank sends only to the next rank. The tensor is cut into one chunk per
rank, and in each step every rank sends one chunk. The fixed cost of a call is not counted.

Sources: Stanford CS336 2026, assignment 2, section 8.1; Austin et al. 2025, How to Scale Your
Model, part 12 ("Intra-node collectives").
"""

from __future__ import annotations

from systems.accounting.hardware import link_bandwidth


def ring_bytes(size_bytes: float, world_size: float) -> float:
    """Return the number of bytes that each rank sends in an all-gather or a reduce-scatter.

    In each of world_size - 1 steps, it sends one chunk of size_bytes / world_size bytes of the
    whole tensor. world_size may be fractional, so that callers can solve for it.

    Raises:
        ValueError: if world_size is less than 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
    return size_bytes * (world_size - 1) / world_size


def all_gather_seconds(size_bytes: float, world_size: float, bandwidth: float) -> float:
    """Return the seconds of a ring all-gather. The bandwidth is the bytes/s that one rank sends."""
    return ring_bytes(size_bytes, world_size) / bandwidth


def reduce_scatter_seconds(size_bytes: float, world_size: float, bandwidth: float) -> float:
    """Return the seconds of a ring reduce-scatter, which are those of an all-gather."""
    return ring_bytes(size_bytes, world_size) / bandwidth


def all_reduce_seconds(size_bytes: float, world_size: float, bandwidth: float) -> float:
    """Return the seconds of a ring all-reduce: a reduce-scatter followed by an all-gather."""
    scatter = reduce_scatter_seconds(size_bytes, world_size, bandwidth)
    return scatter + all_gather_seconds(size_bytes, world_size, bandwidth)


def whole_tensor_all_reduce_seconds(
    size_bytes: float, world_size: float, bandwidth: float
) -> float:
    """Return the seconds of a ring all-reduce in which ranks send whole tensors.

    This is the alternate ring all-reduce of CS336 2026, assignment 2, section 8.1. In the first of
    world_size - 1 steps, each rank sends its own tensor. In later steps, it sends the tensor that
    it received in the previous step. Each rank adds all tensors that it receives to its own. This
    takes world_size / 2 times as long as `all_reduce_seconds`.
    """
    return world_size * ring_bytes(size_bytes, world_size) / bandwidth


def all_reduce_bus_bytes(size_bytes: int, world_size: int) -> float:
    """Return the number of bytes that each rank sends, and receives, in a ring all-reduce.

    size_bytes is the whole tensor. The number divided by the time of an all-reduce is the bus
    bandwidth of nccl-tests. It can be compared with the bandwidth of the link for any number of
    ranks (nccl-tests, doc/PERFORMANCE.md, "AllReduce").
    """
    return 2 * ring_bytes(size_bytes, world_size)


def predicted_all_reduce_seconds(
    device_name: str | None, size_bytes: float, world_size: int
) -> float | None:
    """Return the predicted seconds of a ring all-reduce, or None for an unknown link bandwidth.

    Names are as in nvidia-smi, for example "NVIDIA H200"; `hardware.py` lists those that are known.
    """
    bandwidth = link_bandwidth(device_name)
    return None if bandwidth is None else all_reduce_seconds(size_bytes, world_size, bandwidth)
