"""Predict the cost of data parallel training: DDP, ZeRO, and this project's ShardedOptimizer.

The exposed communication of DDP is the time after backward in which gradients are still
all-reduced.
"""

from __future__ import annotations

import math
from typing import Literal

from systems.accounting.collectives import predicted_all_reduce_seconds, ring_bytes

Strategy = Literal["ddp", "zero1", "zero2", "zero3", "sharded_optimizer"]

# Parts of the state that each strategy shards. A rank keeps 1/world_size of these parts and all of
# the other parts. zero1, zero2 and zero3 are P_os, P_os+g and P_os+g+p in Rajbhandari et al. 2020,
# "ZeRO", section 5. zero3 is FSDP in torch.
_SHARED: dict[Strategy, tuple[str, ...]] = {
    "ddp": (),
    "zero1": ("optimizer_state",),
    "zero2": ("optimizer_state", "gradients"),
    "zero3": ("optimizer_state", "gradients", "weights"),
    "sharded_optimizer": ("optimizer_state",),
}
# Number of ring collectives in a step, by (collective, tensor). A reduce-scatter and an all-gather
# of the gradients are one all-reduce. The collectives of ZeRO are from section 7. zero3 gathers the
# weights once for forward and once for backward. sharded_optimizer all-reduces all gradients. Then
# each rank broadcasts the weights that it updated, which is counted as an all-gather.
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

    All shards are assumed to have the same size. Activations, buffers for gathered weights, and
    copies of weights that autocast makes are not counted. zero1 to zero3 are the stages of ZeRO;
    zero3 is FSDP. `state` has the bytes of the whole model, from `transformer.model_state_bytes`.

    Raises:
        ValueError: if strategy is unknown or world_size is less than 1.
    """
    _check(strategy, world_size)
    shared = _SHARED[strategy]
    return {part: size / (world_size if part in shared else 1) for part, size in state.items()}


def step_sent_bytes(
    strategy: Strategy, state: dict[str, int], world_size: int
) -> dict[tuple[str, str], float]:
    """Return the bytes that one rank sends in a training step with ring collectives.

    A step has one forward and one backward. `state` has the bytes of the weights and gradients of
    the whole model, in the dtypes in which they are sent. The keys of the result are (collective,
    tensor), for example ("reduce_scatter", "gradients").

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
    """Return the time, in seconds, from the end of backward to the end of communication in DDP.

    The gradients, of size_bytes, are divided into buckets of equal size. A bucket is all-reduced as
    soon as its gradients are ready and the all-reduce of the previous bucket is done. For one
    bucket,

        communication = size_bytes / (buckets * bandwidth) + call_seconds
        backward = backward_seconds / buckets

    and the result is

        communication + (buckets - 1) * max(0, communication - backward)

    Args:
        bandwidth: algorithm bandwidth of nccl-tests, in bytes/s: size_bytes / t, where t is the
            time of one all-reduce of all gradients, without its fixed cost.
        call_seconds: fixed cost of each all-reduce.
        backward_seconds: of the whole backward. None means size_bytes / bandwidth, as in Stanford
            CS336 2025, assignment 2, ddp_bucketed_benchmarking (b). The result is then size_bytes /
            (buckets * bandwidth) + buckets * call_seconds.

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
    """Return the number of gradient buckets that minimizes the communication after backward in DDP.

    This minimizes `ddp_overhead_seconds` with backward_seconds=None. If fractions of buckets were
    allowed, the minimum would be at sqrt(size_bytes / (bandwidth * call_seconds)) buckets.

    Raises:
        ValueError: if call_seconds is not positive. Without a fixed cost, more buckets would always
            be better.
    """
    if call_seconds <= 0:
        raise ValueError(f"call_seconds must be more than 0, got {call_seconds}")
    between = math.floor(math.sqrt(size_bytes / (bandwidth * call_seconds)))
    beside = range(max(1, between), between + 2)
    return min(beside, key=lambda n: ddp_overhead_seconds(size_bytes, bandwidth, call_seconds, n))


def best_bucket_bytes(size_bytes: float, bandwidth: float, call_seconds: float) -> float:
    """Return the bytes of a gradient bucket that minimize the communication after backward in DDP.

    They are min(size_bytes, sqrt(size_bytes * bandwidth * call_seconds)). size_bytes need not be a
    multiple of them. The arguments are those of `ddp_overhead_seconds`.
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
    """Return the predicted `ddp_overhead_seconds`, for rings at the full bandwidth of the links.

    Without backward_seconds, backward takes as long as one all-reduce of all gradients without its
    fixed cost. None if the link bandwidth of the device is unknown.
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
