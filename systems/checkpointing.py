"""Activation checkpointing: which activations backward finds saved, and which it computes again.

    model.apply_blocks = every_k_blocks(4)

Each policy is a way to send x through the blocks; the numbers are the same, memory and time are
not. Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".
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

ApplyBlocks = Callable[[nn.ModuleList, Tensor], Tensor]


def every_k_blocks(k: int) -> ApplyBlocks:
    """Keep the input of every k-th block; backward computes the blocks behind it again (section 3).

    Raises:
        ValueError: k is below 1.
    """
    if k < 1:
        raise ValueError(f"k: given {k}, expected at least 1")

    def apply(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for start in range(0, len(blocks), k):
            x = _recomputed(partial(_run, list(blocks)[start : start + k]), x)
        return x

    return apply


def nested() -> ApplyBlocks:
    """Checkpoints inside checkpoints: of each run of blocks keep its input, and within it do the
    same by halves (section 4.3). O(log n) inputs are alive at once; each block is computed again
    at most log2(n) times, half as often on average."""

    def halves(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
        if len(blocks) == 1:
            return _recomputed(blocks[0], x)
        middle = math.ceil(len(blocks) / 2)
        for half in (blocks[:middle], blocks[middle:]):
            x = _recomputed(partial(halves, half), x) if len(half) > 1 else halves(half, x)
        return x

    return lambda blocks, x: halves(list(blocks), x)


def selective() -> ApplyBlocks:
    """Keep what products with weights and fused attention give, compute again the rest: norms,
    RoPE, SiLU, casts, and the scores where attention materialises them (Korthikanti et al. 2022,
    section 5)."""
    keep = {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in keep else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)

    def apply(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for block in blocks:
            x = _recomputed(block, x, context_fn=contexts)
        return x

    return apply


def _run(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def _recomputed(fn: Callable[[Tensor], Tensor], x: Tensor, **kwargs: Any) -> Tensor:
    # There is no dropout: the state of the random numbers need not be kept.
    return checkpoint(fn, x, use_reentrant=False, preserve_rng_state=False, **kwargs)
