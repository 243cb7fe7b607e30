"""Activation checkpointing: policies for which activations are saved and which are recomputed.

    model.apply_blocks = every_k_blocks(4)

Each policy is a way to apply the blocks; results are the same, memory and time differ. Chen et al.
2016, "Training Deep Nets with Sublinear Memory Cost".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from systems.model import apply_in_order

ApplyBlocks = Callable[[nn.ModuleList, Tensor], Tensor]


def every_k_blocks(k: int) -> ApplyBlocks:
    """Save the input of every k-th block; backward recomputes the blocks after it (section 3).

    Raises:
        ValueError: k is below 1.
    """
    if k < 1:
        raise ValueError(f"k: given {k}, expected at least 1")

    def apply(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for start in range(0, len(blocks), k):
            x = _recomputed(partial(apply_in_order, list(blocks)[start : start + k]), x)
        return x

    return apply


def nested() -> ApplyBlocks:
    """Checkpoint recursively: save the input of each half of the blocks, and do the same within it
    (section 4.3). O(log n) inputs are alive at once; each block is recomputed at most log2(n)
    times, half as often on average."""

    def halves(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
        if len(blocks) == 1:
            return _recomputed(blocks[0], x)
        middle = math.ceil(len(blocks) / 2)
        for half in (blocks[:middle], blocks[middle:]):
            x = _recomputed(partial(halves, half), x) if len(half) > 1 else halves(half, x)
        return x

    return lambda blocks, x: halves(list(blocks), x)


def selective() -> ApplyBlocks:
    """Save the outputs of matmuls with weights and of fused attention, and recompute the rest:
    norms, RoPE, SiLU, casts, and materialised scores (Korthikanti et al. 2022, section 5)."""
    saved = {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)

    def apply(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for block in blocks:
            x = _recomputed(block, x, context_fn=contexts)
        return x

    return apply


def _recomputed(fn: Callable[[Tensor], Tensor], x: Tensor, **kwargs: Any) -> Tensor:
    # There is no dropout: random state need not be preserved.
    return checkpoint(fn, x, use_reentrant=False, preserve_rng_state=False, **kwargs)
