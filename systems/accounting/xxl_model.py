"""Memory of XXL, a model of 126 feed-forward blocks that is too large for any single device.

Source: Stanford CS336 2025, assignment 2, communication_accounting. A block is x W_in W_out with
d_model 16384 and d_ff 53248; it has no activation function, attention, norms or embeddings. Master
weights, accumulated gradients and both moments of AdamW are float32. Communication and the tensors
saved for backward are bf16; the input of each matrix is saved and nothing is recomputed. bf16
copies of weights and gathered weights are not counted. GB = 10^9 bytes. Batches are in tokens.
"""

from __future__ import annotations

import math

from systems.accounting.feed_forward import FeedForward

LAYER = FeedForward(d_model=16384, d_ff=53248, matrices=2, element_bytes=2)
BLOCKS = 126
PARAMETERS = BLOCKS * LAYER.weights


def state_bytes() -> dict[str, int]:
    """Return the bytes of float32 state between steps: 16 bytes per parameter."""
    return {
        "weights": 4 * PARAMETERS,
        "gradients": 4 * PARAMETERS,
        "optimizer_state": 8 * PARAMETERS,
    }


def saved_bytes(tokens: int) -> int:
    """Return the bytes saved for backward: the inputs of W_in (d_model) and W_out (d_ff)."""
    return LAYER.element_bytes * BLOCKS * (LAYER.d_model + LAYER.d_ff) * tokens


def devices_worth(tokens: int, memory_bytes: float) -> int:
    """Return the number of devices whose total memory holds the state and saved activations."""
    return math.ceil((sum(state_bytes().values()) + saved_bytes(tokens)) / memory_bytes)


def fsdp_device_bytes(tokens: int, devices: int) -> float:
    """Return the bytes per device if the state S and half of the activations A are sharded.

    This is S / N + A / (2 N) + A / 2 for N devices.

    Args:
        tokens: tokens per device; A is the size of their activations before sharding.
    """
    half = saved_bytes(tokens) / 2
    return (sum(state_bytes().values()) + half) / devices + half


def fsdp_devices(tokens: int, memory_bytes: int) -> int | None:
    """Return the smallest N for which `fsdp_device_bytes` is below the memory M of a device.

    This is the smallest N > (S + A/2) / (M - A/2).

    Returns:
        N, or None if the half of the activations that is not sharded does not fit alone.
    """
    state, saved = sum(state_bytes().values()), saved_bytes(tokens)
    left = 2 * memory_bytes - saved
    return None if left <= 0 else (2 * state + saved) // left + 1
