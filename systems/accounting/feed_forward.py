"""Cost model of a feed-forward layer on many devices: FLOPs, communication, scaling limits.

The devices form a grid with two axes. The batch is split over the devices of the batch axis. The
hidden width of the layer is split over the devices of the tensor axis.

Symbols:

    B            number of tokens in the batch of all devices together
    D, F         width and hidden width of the layer
    x, y, dx     input (B, D) and output (B, D) of the layer, and the gradient of x
    m            number of weight matrices: 3 for SwiGLU, y = (silu(x W1) * x W2) W3
    e            number of bytes per element
    n_d          size of the batch axis. Along this axis, weights are replicated (data parallel, DP)
                 or sharded (FSDP).
    n_t          size of the tensor axis (tensor parallel, TP, as in Megatron). Along this axis, x
                 is replicated, W1 and W2 are split by columns, and W3 is split by rows (Shoeybi et
                 al. 2019, section 3).
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

Communication overlaps computation, so communication is a limit only if it takes longer than the
computation. The communication of an axis takes exactly as long as the computation at

    n_d = 1 + a,  a = 2 B W_d / (e C)         in forward and backward; DP has no limit in forward
    n_t = 1 + b,  b = m F W_t / (e C)         in forward; b is twice as large in backward

The limit of n_d does not depend on n_t, and the limit of n_t does not depend on n_d.

If the axes have separate links, the largest N is (1 + a)(1 + b). If the axes share the same links,
their communication times add up. Communication then takes as long as the computation if

    (n_d - 1) / a + (n_t - 1) / b = 1

Under this condition, N is largest at n_d = a s / 2 and n_t = b s / 2, with s = 1 + 1/a + 1/b. This
gives N = a b s^2 / 4. For large a and b, it is a quarter of the number with separate links.

Arguments that have the same meaning in all functions:

    which     "forward" or "backward"
    layer     sizes of the layer
    tokens    number of tokens on all devices together, B
    on        peak FLOP/s and link bandwidths of a device
    batch     "dp" (replicated weights) or "fsdp" (sharded weights)

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
    """Sizes of a feed-forward layer. d_ff is its hidden width.

    element_bytes is the size of elements of weights, activations and the tensors in collectives.
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
    """Speed of one device and of its links, if devices form a grid with two axes.

    The batch is split along the batch axis (data parallel). The hidden width of the layer is split
    along the tensor axis (tensor parallel). flops are the peak FLOP/s, and bandwidths the bytes/s
    that the device sends along the axis. With shared_links, both axes use the same links, one after
    the other.
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
    """Return the speed of a device and its links from the datasheet, or None if a value is unknown.

    `Machine` describes the two axes. batch_axes and tensor_axes are the numbers of axes of a TPU's
    torus that form the axis; 1 for a GPU. They are called M_X and M_Y in How to Scale Your Model,
    part 5. `hardware.py` lists the known names. Names are as in nvidia-smi, for example "NVIDIA
    H200".
    """
    flops, link = peak_flops(device_name, dtype), link_bandwidth(device_name)
    if flops is None or link is None:
        return None
    return Machine(flops, batch_axes * link, tensor_axes * link, shared_links)


def device_flops(which: Pass, layer: FeedForward, tokens: float, devices: float) -> float:
    """Return the number of matmul FLOPs of one device in a forward or a backward of the layer."""
    return {"forward": 2, "backward": 4}[which] * layer.weights * tokens / devices


def compute_seconds(
    which: Pass, layer: FeedForward, tokens: float, on: Machine, devices: float
) -> float:
    """Return the time, in seconds, of the matmuls of a forward or a backward at peak FLOP/s."""
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
    """Return the time, in seconds, of the collectives of a forward or a backward.

    Devices form a grid: the batch is split along the batch axis, and the hidden width of the layer
    along the tensor axis. If the two axes have separate links, the result is the time of the slower
    axis. If they share links (`on.shared_links`), the result is the sum of both times. In the batch
    mode "dp", weights are replicated along the batch axis; in "fsdp", they are sharded. Numbers of
    devices along an axis are at least 1 and may be fractional.
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
    """Largest number of devices at which communication takes no more time than computation.

    The number of devices is batch_devices * tensor_devices. Neither factor is rounded. A factor is
    infinite if communication never takes longer than computation.
    """

    batch_devices: float
    tensor_devices: float

    @property
    def devices(self) -> float:
        return self.batch_devices * self.tensor_devices


def batch_limit(which: Pass, layer: FeedForward, tokens: float, on: Machine, batch: Batch) -> Limit:
    """Return the largest number of useful devices if only the batch is split (DP or FSDP).

    With more devices, communication takes longer than computation. The limit is 1 + a, where the
    module docstring defines a. It is infinite for DP in forward, which has no communication.
    """
    a, _ = _slack(which, layer, tokens, on, batch)
    return Limit(1 + a, 1)


def tensor_limit(which: Pass, layer: FeedForward, on: Machine) -> Limit:
    """Return the largest number of useful devices if only the hidden width is split (TP).

    With more devices, communication takes longer than computation. The limit is 1 + b, where the
    module docstring defines b. It does not depend on the size of the batch.
    """
    _, b = _slack(which, layer, 1, on, "dp")
    return Limit(1, 1 + b)


def mesh_limit(
    which: Pass, layer: FeedForward, tokens: float, on: Machine, batch: Batch = "fsdp"
) -> Limit:
    """Return the largest number of useful devices if batch and hidden width may both be split.

    With more devices, communication takes longer than computation. The module docstring has the
    formulas for separate links and for shared links. With shared links, it may be best to split
    only the batch or only the hidden width. The other number of devices is then 1.
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

    At this batch, communication takes as long as computation. With the symbols of the module
    docstring, the condition for separate links is (n_d - 1)/a = 1. For shared links, the condition
    is (n_d - 1)/a + (n_t - 1)/b = 1. a is proportional to the batch B, and b does not depend on B.
    With long_rings, the factor (n-1)/n of a ring of n devices is taken as 1, as in How to Scale
    Your Model.

    The tokens are those on all devices together. The result is None if the communication of tensor
    parallelism alone takes too long, because a larger batch does not change this.
    """
    a_of_one, b = _slack(which, layer, 1, on, "fsdp")
    steps = 0 if long_rings else 1
    taken = (tensor_devices - steps) / b
    if taken > 1 or (on.shared_links and taken == 1):
        return None
    left = 1 - taken if on.shared_links else 1
    return (batch_devices - steps) / (a_of_one * left)


def balanced_mesh_tokens(which: Pass, layer: FeedForward, on: Machine) -> float:
    """Return the smallest number of tokens per device at which some mesh is compute-bound.

    The mesh has FSDP along one axis and tensor parallelism along the other. With the symbols of the
    module docstring and the factor (n-1)/n of rings taken as 1, the condition for separate links is
    n_d <= a and n_t <= b. Both hold with equality on the balanced mesh, so each device has
    B / (a b) tokens. This number does not depend on B, because a is proportional to B. With shared
    links, the best mesh has n_d = a/2 and n_t = b/2, so the number is four times as large.

    For two matrices and bf16 it is alpha^2 / (M_X M_Y F) in forward (Austin et al. 2025, How to
    Scale Your Model, part 5), with alpha = C / W and M_X and M_Y axes of the torus.
    """
    a_of_one, b = _slack(which, layer, 1, on, "fsdp")
    return (4 if on.shared_links else 1) / (a_of_one * b)


def pipeline_bubble(stages: int, microbatches: int) -> float:
    """Return the fraction of a step in which a device of a pipeline has no work.

    The fraction is (stages - 1) / (microbatches + stages - 1), if all stages, with equal shares of
    the layers, take the same time for a microbatch and communication takes none. Source: Huang et
    al. 2019, "GPipe", section 2.3.

    Raises:
        ValueError: if stages or microbatches is less than 1.
    """
    if min(stages, microbatches) < 1:
        raise ValueError(
            f"stages and microbatches must be at least 1, got {stages} and {microbatches}"
        )
    return (stages - 1) / (microbatches + stages - 1)


def _slack(
    which: Pass, layer: FeedForward, tokens: float, on: Machine, batch: Batch
) -> tuple[float, float]:
    """Return the limits a and b of communication, which the module docstring defines.

    If only the batch is split over n_d devices, communication takes no more time than computation
    as long as n_d - 1 is at most a. If only the hidden width is split over n_t devices, the
    condition is that n_t - 1 is at most b.
    """
    a = 2 * tokens * on.batch_bandwidth / (layer.element_bytes * on.flops)
    if batch == "dp" and which == "forward":
        a = math.inf
    b = layer.matrices * layer.d_ff * on.tensor_bandwidth / (layer.element_bytes * on.flops)
    return a, b * {"forward": 1, "backward": 2}[which]
