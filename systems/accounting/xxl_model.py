"""Memory of XXL, a model of 126 feed-forward blocks that is too large for any single device.

Source: Stanford CS336 2025, assignment 2, communication_accounting. A block computes x W_in W_out,
with d_model 16384 and d_ff 53248. It has no activation function, attention, norms or embeddings.

    float32         master weights, accumulated gradients, both moments of AdamW
    bf16            communication, and the inputs of W_in and W_out, which are saved for backward
    not counted     bf16 copies of weights, and the weights that FSDP gathers
    recomputation   none

Sizes of batches are numbers of tokens.
"""

from __future__ import annotations

import math

from systems.accounting.feed_forward import FeedForward

LAYER = FeedForward(d_model=16384, d_ff=53248, matrices=2, element_bytes=2)
BLOCKS = 126
PARAMETERS = BLOCKS * LAYER.weights


def state_bytes() -> dict[str, int]:
    """Return the bytes of the float32 state between steps, 16 bytes per parameter."""
    return {
        "weights": 4 * PARAMETERS,
        "gradients": 4 * PARAMETERS,
        "optimizer_state": 8 * PARAMETERS,
    }


def saved_bytes(tokens: int) -> int:
    """Return the bytes of the activations that are saved for backward.

    These are the inputs of W_in (d_model elements per token) and of W_out (d_ff) in every block.
    """
    return LAYER.element_bytes * BLOCKS * (LAYER.d_model + LAYER.d_ff) * tokens


def devices_worth(tokens: int, memory_bytes: float) -> int:
    """Return the number of devices whose memory together holds the state and the saved activations.

    Args:
        tokens: number of tokens whose activations are saved.
        memory_bytes: memory of one device, in bytes.
    """
    return math.ceil((sum(state_bytes().values()) + saved_bytes(tokens)) / memory_bytes)


def fsdp_device_bytes(tokens: int, devices: int) -> float:
    """Return the bytes on each device if the state and half of the saved activations are sharded.

    With N devices, S bytes of state and A bytes of saved activations, this is
    S / N + (A / 2) / N + A / 2.

    Args:
        tokens: number of tokens on each device. A is the size of their activations.
        devices: number of devices N.
    """
    half = saved_bytes(tokens) / 2
    return (sum(state_bytes().values()) + half) / devices + half


def fsdp_devices(tokens: int, memory_bytes: int) -> int | None:
    """Return the smallest number of devices on which the model fits with FSDP.

    The bytes on a device, `fsdp_device_bytes`, must be less than its memory.

    Args:
        tokens: number of tokens on each device.
        memory_bytes: memory of one device, in bytes.

    Returns:
        The number of devices, or None if the unsharded half of the activations already exceeds the
        memory of a device.
    """
    state, saved = sum(state_bytes().values()), saved_bytes(tokens)
    left = 2 * memory_bytes - saved
    return None if left <= 0 else (2 * state + saved) // left + 1
