"""Cost model of a feed-forward layer on many devices: FLOPs, communication, scaling limits.

    B            tokens in the batch of all devices
    D, F         width and hidden width
    m            weight matrices; 3 for SwiGLU, y = (silu(x W1) * x W2) W3
    e            bytes per element
    n_d          devices over which the batch is split: data parallel (DP, replicated weights) or
                 FSDP (sharded weights)
    n_t          devices over which F is split: tensor parallel (TP) as in Megatron, with x
                 replicated, W1 and W2 split by columns, W3 by rows (Shoeybi et al. 2019, section 3)
    N            devices, n_d n_t
    C            FLOP/s of a device
    W_d, W_t     bytes/s that a device sends along the batch axis and along the tensor axis

Collectives are rings (collectives.py). The work of one device is

    forward      2 m B D F / N FLOPs: a multiplication and an addition per weight and token
    backward     4 m B D F / N FLOPs: gradients of the weights and of the inputs
    DP           backward: all-reduce of the gradients, e m D F / n_t bytes
    FSDP         forward: all-gather of the weights, e m D F / n_t bytes
                 backward: the same all-gather, and a reduce-scatter of as many bytes
    TP           forward: all-reduce of y, e B D / n_d bytes
                 backward: all-reduce of dx, of the same size

Communication overlaps computation, so it limits the layer only where it takes longer. The
communication of one axis takes as long as the computation at

    n_d - 1 = a,  a = 2 B W_d / (e C)         in both passes; DP has no limit in forward
    n_t - 1 = b,  b = m F W_t / (e C)         in forward; b is twice as large in backward

and neither limit depends on the other axis. If each axis has its own links, N = (1 + a)(1 + b). If
both axes share the same links, their times add up: (n_d - 1)/a + (n_t - 1)/b = 1. Then N is largest
at n_d = a s / 2 and n_t = b s / 2 with s = 1 + 1/a + 1/b. That is N = a b s^2 / 4, a quarter of
the number with separate links if a and b are large.

Only matmuls are counted. Sources: Stanford CS336 2026, assignment 2, section 8.2 to 8.5 (e = 2,
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
Batch = Literal["dp", "fsdp"]  # weights along the batch axis: replicated or sharded
PASSES: tuple[Pass, ...] = get_args(Pass)
BATCHES: tuple[Batch, ...] = get_args(Batch)


@dataclass(frozen=True)
class FeedForward:
    """Sizes of one layer. element_bytes holds for weights, activations and communication."""

    d_model: int
    d_ff: int
    matrices: int = 3
    element_bytes: int = 2

    @property
    def weights(self) -> int:
        return self.matrices * self.d_model * self.d_ff


@dataclass(frozen=True)
class Machine:
    """Speed of one device and of its links.

    Args:
        flops: C, in FLOP/s.
        batch_bandwidth, tensor_bandwidth: W_d and W_t, in bytes/s that the device sends along each
            axis.
        shared_links: True if both axes use the same links, one after the other.
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
    """Return the Machine of a device from its datasheet, or None if unknown.

    Args:
        device_name: name of the device in `hardware`.
        dtype: dtype of the matmuls.
        batch_axes, tensor_axes: axes of a TPU's torus along which the batch and F are split (M_X
            and M_Y in How to Scale Your Model, part 5); 1 for a GPU.
        shared_links: True if both axes use the same links, one after the other.
    """
    flops, link = peak_flops(device_name, dtype), link_bandwidth(device_name)
    if flops is None or link is None:
        return None
    return Machine(flops, batch_axes * link, tensor_axes * link, shared_links)


def device_flops(which: Pass, layer: FeedForward, tokens: float, devices: float) -> float:
    """Return the FLOPs of one device in one pass, for a batch of `tokens` on all devices."""
    return {"forward": 2, "backward": 4}[which] * layer.weights * tokens / devices


def compute_seconds(
    which: Pass, layer: FeedForward, tokens: float, on: Machine, devices: float
) -> float:
    """Return the seconds of the matmuls of one pass at the machine's peak FLOP/s."""
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
    """Return the seconds of the collectives of one pass.

    With separate links this is the time of the slower axis; with shared links, the sum of both.

    Args:
        tokens: B, tokens on all devices together.
        batch: dp or fsdp.
        batch_devices, tensor_devices: n_d and n_t, at least 1; may be fractional.
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
    """Largest number of devices at which communication does not take longer than computation.

    Real numbers, not rounded; inf if communication never takes longer.
    """

    batch_devices: float
    tensor_devices: float

    @property
    def devices(self) -> float:
        return self.batch_devices * self.tensor_devices


def batch_limit(which: Pass, layer: FeedForward, tokens: float, on: Machine, batch: Batch) -> Limit:
    """Return the limit if only the batch is split: 1 + a devices, or inf for DP in forward."""
    a, _ = _slack(which, layer, tokens, on, batch)
    return Limit(1 + a, 1)


def tensor_limit(which: Pass, layer: FeedForward, on: Machine) -> Limit:
    """Return the limit if only F is split: 1 + b devices, for any batch."""
    _, b = _slack(which, layer, 1, on, "dp")
    return Limit(1, 1 + b)


def mesh_limit(
    which: Pass, layer: FeedForward, tokens: float, on: Machine, batch: Batch = "fsdp"
) -> Limit:
    """Return the limit if the batch and F are split: the n_d and n_t with the largest n_d n_t."""
    a, b = _slack(which, layer, tokens, on, batch)
    if not on.shared_links or math.isinf(a):
        return Limit(1 + a, 1 + b)
    s = 1 + 1 / a + 1 / b
    batch_devices, tensor_devices = a * s / 2, b * s / 2
    # One of the two may be below a single device, but never both.
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
    """Return the smallest batch B at which a mesh of FSDP and tensor parallelism is compute-bound.

    Solves (n_d - 1)/a = 1 for B, to which a is proportional; with shared links, it solves
    (n_d - 1)/a + (n_t - 1)/b = 1.

    Args:
        long_rings: take (n-1)/n as 1, as How to Scale Your Model does.

    Returns:
        B in tokens on all devices together, or None if tensor parallelism alone takes longer than
        the computation, which no batch size can change.
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
    """Return a and b, the limits of n_d - 1 and n_t - 1 for each axis alone."""
    a = 2 * tokens * on.batch_bandwidth / (layer.element_bytes * on.flops)
    if batch == "dp" and which == "forward":
        a = math.inf
    b = layer.matrices * layer.d_ff * on.tensor_bandwidth / (layer.element_bytes * on.flops)
    return a, b * {"forward": 1, "backward": 2}[which]
