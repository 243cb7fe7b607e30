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
    """Return the bytes that the model XXL keeps between steps, all in float32.

    The keys are "weights", "gradients" and "optimizer_state". The sum is 16 bytes per parameter.
    """
    return {
        "weights": 4 * PARAMETERS,
        "gradients": 4 * PARAMETERS,
        "optimizer_state": 8 * PARAMETERS,
    }


def saved_bytes(tokens: int) -> int:
    """Return the bytes of the activations that the model XXL saves for backward.

    Each block saves the inputs of its two matrices: d_model elements per token for W_in, and d_ff
    elements per token for W_out.
    """
    return LAYER.element_bytes * BLOCKS * (LAYER.d_model + LAYER.d_ff) * tokens


def devices_worth(tokens: int, memory_bytes: float) -> int:
    """Return the smallest number of devices whose total memory holds the model XXL.

    The memory must hold the state and the activations saved for backward. The state is all weights,
    gradients and AdamW moments, in float32. `tokens` is the number of those whose activations are
    saved, and `memory_bytes` the memory of a device.
    """
    return math.ceil((sum(state_bytes().values()) + saved_bytes(tokens)) / memory_bytes)


def fsdp_device_bytes(tokens: int, devices: int) -> float:
    """Return the bytes on each device if the model XXL is trained with FSDP.

    The state (all weights, gradients and AdamW moments) is sharded over the devices. Half of the
    activations saved for backward is sharded too, and every device keeps the other half completely.
    With N devices, S bytes of state and A bytes of activations saved for the tokens on each device,
    the result is S / N + (A / 2) / N + A / 2.
    """
    half = saved_bytes(tokens) / 2
    return (sum(state_bytes().values()) + half) / devices + half


def fsdp_devices(tokens: int, memory_bytes: int) -> int | None:
    """Return the smallest number of devices on which the model XXL fits with FSDP.

    The model fits if the bytes on a device are less than the memory of the device.
    `fsdp_device_bytes` computes the bytes on a device, with half of the saved activations sharded.
    `tokens` are those on each device. The result is None if the half of the activations that is not
    sharded already fills the memory of a device, so that the model fits on no number of devices.
    """
    state, saved = sum(state_bytes().values()), saved_bytes(tokens)
    left = 2 * memory_bytes - saved
    return None if left <= 0 else (2 * state + saved) // left + 1
