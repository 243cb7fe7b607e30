"""XXL, a model too large for any device: 126 blocks of two matrices, its memory and its batch.

Stanford CS336 2025, assignment 2, communication_accounting. A block is x W_in W_out, d_model 16384,
d_ff 53248, and nothing else: no activation function, attention, norms or embeddings. float32:
master weights, accumulated gradients and AdamW's two moments. bf16: what is saved for backward, the
input of each of the two matrices (nothing is recomputed), and what is sent. bf16 copies of weights
and gathered weights are not counted. GB = 10^9 bytes. Batches are in tokens.
"""

from __future__ import annotations

import math

from systems.accounting.feed_forward import FeedForward

LAYER = FeedForward(d_model=16384, d_ff=53248, matrices=2, element_bytes=2)
BLOCKS = 126
PARAMETERS = BLOCKS * LAYER.weights


def state_bytes() -> dict[str, int]:
    """Return bytes of state between steps, all float32: 16 bytes per parameter."""
    return {
        "weights": 4 * PARAMETERS,
        "gradients": 4 * PARAMETERS,
        "optimizer_state": 8 * PARAMETERS,
    }


def saved_bytes(tokens: int) -> int:
    """Return bytes saved for backward: the inputs of W_in (d_model) and W_out (d_ff)."""
    return LAYER.element_bytes * BLOCKS * (LAYER.d_model + LAYER.d_ff) * tokens


def devices_worth(tokens: int, memory_bytes: float) -> int:
    """Return how many devices have the memory for state and saved activations."""
    return math.ceil((sum(state_bytes().values()) + saved_bytes(tokens)) / memory_bytes)


def fsdp_device_bytes(tokens: int, devices: int) -> float:
    """Return S / N + A / (2 N) + A / 2: state S and half of activations A sharded over N.

    Args:
        tokens: those whose activations A would be on one device if nothing were sharded.
    """
    half = saved_bytes(tokens) / 2
    return (sum(state_bytes().values()) + half) / devices + half


def fsdp_devices(tokens: int, memory_bytes: int) -> int | None:
    """Return the fewest devices whose memory is enough: N > (S + A/2) / (M - A/2).

    Returns:
        None if the half of the activations that is not sharded does not fit on its own.
    """
    state, saved = sum(state_bytes().values()), saved_bytes(tokens)
    left = 2 * memory_bytes - saved
    return None if left <= 0 else (2 * state + saved) // left + 1
