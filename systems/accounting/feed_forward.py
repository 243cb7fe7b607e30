"""A feed-forward layer on many devices: FLOPs, communication, and the device count it limits.

B tokens, width D, hidden width F, m matrices (3 of SwiGLU, y = (silu(x W1) * x W2) W3), e bytes an
element. n_d devices share the batch (data parallel, weights whole; or FSDP, weights sharded too)
and n_t share F (tensor parallel, Megatron's: x whole, W1 and W2 cut by columns, W3 by rows; Shoeybi
et al. 2019, section 3); N = n_d n_t. C FLOP/s a device; W_d and W_t bytes/s that a device sends to
those it shares the batch, or F, with; collectives on rings (collectives.py). Then a device has

    forward    2 m B D F / N    FLOPs; of each weight and token a product and a sum
    backward   4 m B D F / N    twice that: gradients of weights and of inputs
    DP         forward nothing; backward an all-reduce of its gradients, e m D F / n_t bytes
    FSDP       forward an all-gather of as many; backward that again and a reduce-scatter
    TP         forward an all-reduce of y, e B D / n_d bytes; backward one of dx

Communication goes on beside computation, and binds where it takes longer: by axis, beyond

    n_d - 1 = a,  a = 2 B W_d / (e C)         the same in backward; DP: never in forward
    n_t - 1 = b,  b = m F W_t / (e C)         twice that in backward

whatever the other axis does. With both axes, and links of their own, N = (1 + a)(1 + b). With one
link that both share, (n_d - 1)/a + (n_t - 1)/b = 1, and n_d n_t is largest at n_d = a s / 2,
n_t = b s / 2, s = 1 + 1/a + 1/b: N = a b s^2 / 4, a quarter as many where both are large.

Only matrix products count. Sources: Stanford CS336 2026, assignment 2, section 8.2 to 8.5 (e = 2,
m = 3); Austin et al. 2025, How to Scale Your Model, part 5 (m = 2, (n-1)/n taken as 1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from systems.accounting.collectives import (
    all_gather_seconds,
    all_reduce_seconds,
    reduce_scatter_seconds,
)
from systems.accounting.hardware import link_bandwidth, peak_flops

Pass = Literal["forward", "backward"]
Batch = Literal["dp", "fsdp"]  # how devices that share the batch keep the weights
PASSES: tuple[Pass, ...] = get_args(Pass)
BATCHES: tuple[Batch, ...] = get_args(Batch)


@dataclass(frozen=True)
class FeedForward:
    """Sizes of one layer; weights, activations and what is sent have the same element_bytes."""

    d_model: int
    d_ff: int
    matrices: int = 3
    element_bytes: int = 2

    @property
    def weights(self) -> int:
        return self.matrices * self.d_model * self.d_ff


@dataclass(frozen=True)
class Machine:
    """One device of many.

    flops: C, FLOP/s.
    batch_bandwidth, tensor_bandwidth: W_d and W_t, bytes/s that it sends along each axis.
    shared_links: the two axes take turns on the same links.
    """

    flops: float
    batch_bandwidth: float
    tensor_bandwidth: float
    shared_links: bool = False


def machine(
    device_name: str | None,
    dtype: str = "bf16",
    batch_axes: int = 1,
    tensor_axes: int = 1,
    shared_links: bool = False,
) -> Machine | None:
    """Return a Machine by its datasheet, or None if unknown.

    Args:
        batch_axes, tensor_axes: M_X and M_Y of How to Scale Your Model, part 5: axes of the torus
            that each kind of parallelism is spread over; of a GPU, 1.
    """
    flops, link = peak_flops(device_name, dtype), link_bandwidth(device_name)
    if flops is None or link is None:
        return None
    return Machine(flops, batch_axes * link, tensor_axes * link, shared_links)


def device_flops(which: Pass, layer: FeedForward, tokens: float, devices: float) -> float:
    """Return FLOPs of one device in one pass; `tokens` is B, of all devices together."""
    return {"forward": 2, "backward": 4}[which] * layer.weights * tokens / devices


def compute_seconds(
    which: Pass, layer: FeedForward, tokens: float, on: Machine, devices: float
) -> float:
    """Return seconds of matmuls in one pass at the machine's peak."""
    return device_flops(which, layer, tokens, devices) / on.flops


def communication_seconds(
    which: Pass,
    layer: FeedForward,
    tokens: float,
    on: Machine,
    batch: Batch,
    batch_devices: float = 1,
    tensor_devices: float = 1,
) -> float:
    """Return seconds of collectives in one pass: of the slower axis, or of both on shared links.

    Args:
        tokens: B, of all devices together.
        batch_devices, tensor_devices: n_d and n_t, at least 1, not necessarily integers.
    """
    weights = layer.element_bytes * layer.weights / tensor_devices
    activations = layer.element_bytes * layer.d_model * tokens / batch_devices
    ring = (batch_devices, on.batch_bandwidth)
    along_batch = {
        ("dp", "forward"): 0.0,
        ("dp", "backward"): all_reduce_seconds(weights, *ring),
        ("fsdp", "forward"): all_gather_seconds(weights, *ring),
        ("fsdp", "backward"): all_gather_seconds(weights, *ring)
        + reduce_scatter_seconds(weights, *ring),
    }[batch, which]
    along_tensor = all_reduce_seconds(activations, tensor_devices, on.tensor_bandwidth)
    return along_batch + along_tensor if on.shared_links else max(along_batch, along_tensor)


@dataclass(frozen=True)
class Limit:
    """The most devices before communication binds, as real numbers; inf where it never does."""

    batch_devices: float
    tensor_devices: float

    @property
    def devices(self) -> float:
        return self.batch_devices * self.tensor_devices


def batch_limit(which: Pass, layer: FeedForward, tokens: float, on: Machine, batch: Batch) -> Limit:
    """Return the most devices if only the batch is shared: 1 + a, or inf for DP in forward."""
    a, _ = _slack(which, layer, tokens, on, batch)
    return Limit(1 + a, 1)


def tensor_limit(which: Pass, layer: FeedForward, on: Machine) -> Limit:
    """Return the most devices if only F is shared: 1 + b, for any batch."""
    _, b = _slack(which, layer, 1, on, "dp")
    return Limit(1, 1 + b)


def mesh_limit(
    which: Pass, layer: FeedForward, tokens: float, on: Machine, batch: Batch = "fsdp"
) -> Limit:
    """Return the most devices n_d n_t that share batch and F, at the best n_d and n_t."""
    a, b = _slack(which, layer, tokens, on, batch)
    if not on.shared_links or math.isinf(a):
        return Limit(1 + a, 1 + b)
    s = 1 + 1 / a + 1 / b
    batch_devices, tensor_devices = a * s / 2, b * s / 2
    # One of them may come out below a single device; never both.
    if batch_devices < 1:
        return Limit(1, 1 + b)
    if tensor_devices < 1:
        return Limit(1 + a, 1)
    return Limit(batch_devices, tensor_devices)


def compute_bound_tokens(
    which: Pass,
    layer: FeedForward,
    on: Machine,
    batch_devices: int,
    tensor_devices: int,
    long_rings: bool = False,
) -> float | None:
    """Return B, the fewest tokens of all devices together at which FSDP and tensor parallelism do
    not bind: (n_d - 1)/a = 1, a growing with B; with shared links (n_d - 1)/a + (n_t - 1)/b = 1.

    Args:
        long_rings: take (n-1)/n as 1, as How to Scale Your Model does.

    Returns:
        None where tensor parallelism alone binds, which no batch helps.
    """
    a_of_one, b = _slack(which, layer, 1, on, "fsdp")
    steps = 0 if long_rings else 1
    taken = (tensor_devices - steps) / b
    if taken > 1 or (on.shared_links and taken == 1):
        return None
    left = 1 - taken if on.shared_links else 1
    return (batch_devices - steps) / (a_of_one * left)


def _slack(
    which: Pass, layer: FeedForward, tokens: float, on: Machine, batch: Batch
) -> tuple[float, float]:
    """Return a and b: how far beyond one device each axis can grow before it binds alone."""
    a = 2 * tokens * on.batch_bandwidth / (layer.element_bytes * on.flops)
    if batch == "dp" and which == "forward":
        a = math.inf
    b = layer.matrices * layer.d_ff * on.tensor_bandwidth / (layer.element_bytes * on.flops)
    return a, b * {"forward": 1, "backward": 2}[which]
