"""Cost model of a feed-forward layer on many devices: FLOPs, communication, scaling limits.

Symbols:

    B            number of tokens in the batch of all devices together
    D, F         width and hidden width of the layer
    x, y, dx     input (B, D) and output (B, D) of the layer, and the gradient of x
    m            number of weight matrices: 3 for SwiGLU, y = (silu(x W1) * x W2) W3
    e            number of bytes per element
    n_d          number of devices over which the batch is split. Their weights are replicated (data
                 parallel, DP) or sharded (FSDP).
    n_t          number of devices over which F is split (tensor parallel, TP, as in Megatron). x is
                 replicated, W1 and W2 are split by columns, W3 is split by rows (Shoeybi et al.
                 2019, section 3).
    N            number of devices, n_d n_t
    C            peak FLOP/s of a device
    W_d, W_t     bytes/s that a device sends along the batch axis and along the tensor axis

Collectives are rings (collectives.py). One device does the following work:

    forward      2 m B D F / N FLOPs: a multiplication and an addition for each weight and token
    backward     4 m B D F / N FLOPs: half for the gradients of the weights, half for dx
    DP           backward: all-reduce of the weight gradients, e m D F / n_t bytes
    FSDP         forward: all-gather of the weights, e m D F / n_t bytes
                 backward: the same all-gather, and a reduce-scatter of the same size
    TP           forward: all-reduce of y, e B D / n_d bytes
                 backward: all-reduce of dx, of the same size

Communication overlaps computation, so it is a limit only if it takes longer. On each axis, it takes
exactly as long as the computation at

    n_d = 1 + a,  a = 2 B W_d / (e C)         in forward and backward; DP has no limit in forward
    n_t = 1 + b,  b = m F W_t / (e C)         in forward; b is twice as large in backward

The limit of n_d does not depend on n_t, and the limit of n_t does not depend on n_d.

If the axes have separate links, the largest N is (1 + a)(1 + b). If the axes share the same links,
their communication times add up. Communication then takes as long as the computation if

    (n_d - 1) / a + (n_t - 1) / b = 1

Under this condition, N is largest at n_d = a s / 2 and n_t = b s / 2, with s = 1 + 1/a + 1/b. This
gives N = a b s^2 / 4. For large a and b, it is a quarter of the number with separate links.

Only matmuls are counted as computation. Sources: Stanford CS336 2026, assignment 2, sections 8.2 to
8.5, with e = 2 and m = 3; Austin et al. 2025, How to Scale Your Model, part 5, with m = 2. The
latter takes the factor (n-1)/n of a ring of n devices as 1.
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
Batch = Literal["dp", "fsdp"]  # weights are replicated or sharded
PASSES: tuple[Pass, ...] = get_args(Pass)
BATCHES: tuple[Batch, ...] = get_args(Batch)


@dataclass(frozen=True)
class FeedForward:
    """Sizes of a feed-forward layer.

    Args:
        d_model, d_ff: width and hidden width of the layer.
        matrices: number of weight matrices.
        element_bytes: number of bytes per element of weights, activations and communication.
    """

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
        flops: peak FLOP/s of the device.
        batch_bandwidth: bandwidth along the axis over which the batch is split, in bytes/s sent.
        tensor_bandwidth: bandwidth along the axis over which the hidden width is split, in bytes/s
            sent.
        shared_links: whether both axes use the same links, one after the other.
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
    """Return the speed of a device according to its datasheet, or None if it is unknown.

    Args:
        device_name: name of the device in `hardware.py`.
        dtype: dtype name of the matmuls.
        batch_axes: number of axes of a TPU's torus over which the batch is split; 1 for a GPU. This
            is M_X in How to Scale Your Model, part 5.
        tensor_axes: number of axes of a TPU's torus over which the hidden width is split; 1 for a
            GPU. This is M_Y in How to Scale Your Model, part 5.
        shared_links: whether both axes use the same links, one after the other.
    """
    flops, link = peak_flops(device_name, dtype), link_bandwidth(device_name)
    if flops is None or link is None:
        return None
    return Machine(flops, batch_axes * link, tensor_axes * link, shared_links)


def device_flops(which: Pass, layer: FeedForward, tokens: float, devices: float) -> float:
    """Return the number of matmul FLOPs of one device in one pass.

    Args:
        which: "forward" or "backward".
        layer: sizes of the layer.
        tokens: number of tokens on all devices together.
        devices: number of devices.
    """
    return {"forward": 2, "backward": 4}[which] * layer.weights * tokens / devices


def compute_seconds(
    which: Pass, layer: FeedForward, tokens: float, on: Machine, devices: float
) -> float:
    """Return the time of the matmuls of one pass at peak FLOP/s, in seconds.

    Args:
        which, layer, tokens, devices: as for `device_flops`.
        on: speed of each device.
    """
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
    """Return the time of the collectives of one pass, in seconds.

    If the axes have separate links, this is the time of the slower axis. If they share links, it is
    the sum of both times.

    Args:
        which: "forward" or "backward".
        layer: sizes of the layer.
        tokens: number of tokens on all devices together.
        on: speed of each device.
        batch: "dp" (replicated weights) or "fsdp" (sharded weights).
        batch_devices: number of devices over which the batch is split, at least 1; may be
            fractional.
        tensor_devices: number of devices over which the hidden width is split, at least 1; may be
            fractional.
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

    The numbers are not rounded. They are infinite if communication never takes longer.

    Args:
        batch_devices: number of devices over which the batch is split.
        tensor_devices: number of devices over which the hidden width is split.
    """

    batch_devices: float
    tensor_devices: float

    @property
    def devices(self) -> float:
        return self.batch_devices * self.tensor_devices


def batch_limit(which: Pass, layer: FeedForward, tokens: float, on: Machine, batch: Batch) -> Limit:
    """Return the largest number of devices if only the batch is split.

    This is 1 + a, with a as in the module docstring, or infinity for DP in forward.
    """
    a, _ = _slack(which, layer, tokens, on, batch)
    return Limit(1 + a, 1)


def tensor_limit(which: Pass, layer: FeedForward, on: Machine) -> Limit:
    """Return the largest number of devices if only the hidden width is split.

    This is 1 + b, with b as in the module docstring. It does not depend on the size of the batch.
    """
    _, b = _slack(which, layer, 1, on, "dp")
    return Limit(1, 1 + b)


def mesh_limit(
    which: Pass, layer: FeedForward, tokens: float, on: Machine, batch: Batch = "fsdp"
) -> Limit:
    """Return the largest number of devices if the batch and the hidden width are both split.

    The module docstring has the formulas for separate and for shared links.
    """
    a, b = _slack(which, layer, tokens, on, batch)
    if not on.shared_links or math.isinf(a):
        return Limit(1 + a, 1 + b)
    s = 1 + 1 / a + 1 / b
    batch_devices, tensor_devices = a * s / 2, b * s / 2
    # The best real numbers may be less than 1 on one axis, but never on both. That axis then gets
    # one device, and the other axis is the only one that is split.
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
    """Return the smallest batch, in tokens, at which FSDP with tensor parallelism is compute-bound.

    With the symbols of the module docstring, this is the B at which (n_d - 1)/a = 1, or with shared
    links (n_d - 1)/a + (n_t - 1)/b = 1. Only a depends on B: it is proportional to B.

    Args:
        which: "forward" or "backward".
        layer: sizes of the layer.
        on: speed of each device.
        batch_devices: number of devices n_d over which the batch is split.
        tensor_devices: number of devices n_t over which the hidden width is split.
        long_rings: whether to take the factor (n-1)/n of a ring of n devices as 1, as How to Scale
            Your Model does.

    Returns:
        Number of tokens on all devices together. None if the communication of tensor parallelism
        alone takes too long, because a larger batch does not change this.
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
    """Return a and b of the module docstring.

    If only one axis is used, n_d - 1 can be at most a, or n_t - 1 at most b.
    """
    a = 2 * tokens * on.batch_bandwidth / (layer.element_bytes * on.flops)
    if batch == "dp" and which == "forward":
        a = math.inf
    b = layer.matrices * layer.d_ff * on.tensor_bandwidth / (layer.element_bytes * on.flops)
    return a, b * {"forward": 1, "backward": 2}[which]
