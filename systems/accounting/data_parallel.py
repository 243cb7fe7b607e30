"""Costs of data parallel training: exposed communication of DDP, and state and traffic of ZeRO.

State and traffic are the bytes that a rank keeps, and that it sends in a step, with DDP, the stages
of ZeRO and this project's ShardedOptimizer.
"""

from __future__ import annotations

import math
from typing import Literal

from systems.accounting.collectives import predicted_all_reduce_seconds, ring_bytes

Strategy = Literal["ddp", "zero1", "zero2", "zero3", "sharded_optimizer"]

# State that is sharded, so that a rank keeps 1/n of it; the rest is replicated. ZeRO: Rajbhandari
# et al. 2020, section 5, P_os, P_os+g and P_os+g+p. zero3 is what torch calls FSDP.
_SHARED: dict[Strategy, tuple[str, ...]] = {
    "ddp": (),
    "zero1": ("optimizer_state",),
    "zero2": ("optimizer_state", "gradients"),
    "zero3": ("optimizer_state", "gradients", "weights"),
    "sharded_optimizer": ("optimizer_state",),
}
# Ring collectives in a step. A reduce-scatter and an all-gather of gradients are an all-reduce.
# ZeRO: section 7; zero3 gathers the weights for forward and again for backward. sharded_optimizer
# all-reduces all gradients, though a rank needs only 1/n of them; then each rank broadcasts the
# weights that it updated.
_ROUNDS: dict[Strategy, dict[tuple[str, str], int]] = {
    "ddp": {("reduce_scatter", "gradients"): 1, ("all_gather", "gradients"): 1},
    "zero1": {("reduce_scatter", "gradients"): 1, ("all_gather", "weights"): 1},
    "zero2": {("reduce_scatter", "gradients"): 1, ("all_gather", "weights"): 1},
    "zero3": {("reduce_scatter", "gradients"): 1, ("all_gather", "weights"): 2},
    "sharded_optimizer": {
        ("reduce_scatter", "gradients"): 1,
        ("all_gather", "gradients"): 1,
        ("all_gather", "weights"): 1,
    },
}
STRATEGIES: tuple[Strategy, ...] = tuple(_SHARED)


def rank_state_bytes(
    strategy: Strategy, state: dict[str, int], world_size: int
) -> dict[str, float]:
    """Return the bytes of weights, gradients and optimizer state that one rank keeps.

    Shards are assumed to be equal. Buffers of gathered weights, activations and the copies of
    weights under autocast are not counted.

    Args:
        strategy: one of STRATEGIES.
        state: bytes of the whole model by the names weights, gradients and optimizer_state, as
            returned by `transformer.model_state_bytes`.
        world_size: number of ranks n, at least 1.

    Raises:
        ValueError: if strategy is unknown or world_size is less than 1.
    """
    _check(strategy, world_size)
    shared = _SHARED[strategy]
    return {part: size / (world_size if part in shared else 1) for part, size in state.items()}


def step_sent_bytes(
    strategy: Strategy, state: dict[str, int], world_size: int
) -> dict[tuple[str, str], float]:
    """Return the bytes that one rank sends in a step with ring collectives.

    A step has one forward and one backward. sharded_optimizer broadcasts weights from their owners;
    on average over the ranks this sends as many bytes as the all-gather that is counted here.

    Args:
        strategy: one of STRATEGIES.
        state: as for `rank_state_bytes`, in the dtypes in which tensors are sent.
        world_size: number of ranks n, at least 1.

    Returns:
        Bytes by (collective, tensor), for example ("reduce_scatter", "gradients").

    Raises:
        ValueError: if strategy is unknown or world_size is less than 1.
    """
    _check(strategy, world_size)
    return {
        (collective, tensor): rounds * ring_bytes(state[tensor], world_size)
        for (collective, tensor), rounds in _ROUNDS[strategy].items()
    }


def ddp_overhead_seconds(
    size_bytes: float,
    bandwidth: float,
    call_seconds: float,
    buckets: int,
    backward_seconds: float | None = None,
) -> float:
    """Return the seconds of exposed communication of DDP, after the end of backward.

    All buckets have the same size. Each is all-reduced as soon as its gradients are ready and the
    previous bucket is done. With n_b buckets, each of which takes m = s / (n_b w) + o seconds of
    communication and c seconds of backward, the result is m + (n_b - 1) max(0, m - c). Stanford
    CS336 2025, assignment 2, ddp_bucketed_benchmarking (b) assumes c = s / (n_b w), which gives
    s / (n_b w) + n_b o.

    Args:
        size_bytes: size s of all gradients, in bytes.
        bandwidth: w, in bytes/s: s divided by the time of one all-reduce of all gradients (the
            algorithm bandwidth of nccl-tests).
        call_seconds: fixed cost o of each all-reduce, in seconds.
        buckets: number of buckets n_b, at least 1.
        backward_seconds: time n_b c of the whole backward; None assumes s / w, as the assignment
            does.

    Raises:
        ValueError: if buckets is less than 1.
    """
    if buckets < 1:
        raise ValueError(f"buckets must be at least 1, got {buckets}")
    whole = size_bytes / bandwidth
    communication = whole / buckets + call_seconds
    backward = (whole if backward_seconds is None else backward_seconds) / buckets
    return communication + (buckets - 1) * max(0.0, communication - backward)


def best_bucket_count(size_bytes: float, bandwidth: float, call_seconds: float) -> int:
    """Return the number of buckets n_b with the least exposed communication s / (n_b w) + n_b o.

    The minimum over real numbers is at sqrt(s / (w o)). Takes the arguments of
    `ddp_overhead_seconds`.

    Raises:
        ValueError: if call_seconds is not positive: more buckets would then always be better.
    """
    if call_seconds <= 0:
        raise ValueError(f"call_seconds must be more than 0, got {call_seconds}")
    between = math.floor(math.sqrt(size_bytes / (bandwidth * call_seconds)))
    beside = range(max(1, between), between + 2)
    return min(beside, key=lambda n: ddp_overhead_seconds(size_bytes, bandwidth, call_seconds, n))


def best_bucket_bytes(size_bytes: float, bandwidth: float, call_seconds: float) -> float:
    """Return the bucket size with the least exposed communication, min(s, sqrt(s w o)), in bytes.

    The number of buckets is not rounded to an integer. Takes the arguments of
    `ddp_overhead_seconds`.
    """
    return min(size_bytes, math.sqrt(size_bytes * bandwidth * call_seconds))


def predicted_ddp_overhead_seconds(
    device_name: str | None,
    size_bytes: float,
    world_size: int,
    call_seconds: float,
    buckets: int,
    backward_seconds: float | None = None,
) -> float | None:
    """Return the seconds of exposed communication of DDP on a device, or None if unknown.

    The bandwidth is that of a ring all-reduce over the device's link. Takes the arguments of
    `ddp_overhead_seconds` and `predicted_all_reduce_seconds`.
    """
    whole = predicted_all_reduce_seconds(device_name, size_bytes, world_size)
    if whole is None:
        return None
    bandwidth = size_bytes / whole if whole else math.inf  # a single rank sends nothing
    return ddp_overhead_seconds(size_bytes, bandwidth, call_seconds, buckets, backward_seconds)


def _check(strategy: str, world_size: int) -> None:
    problems = []
    if strategy not in STRATEGIES:
        problems.append(f"strategy must be one of {', '.join(STRATEGIES)}, got {strategy!r}")
    if world_size < 1:
        problems.append(f"world_size must be at least 1, got {world_size}")
    if problems:
        raise ValueError("; ".join(problems))
