"""Activation checkpointing: policies that select which activations are saved or recomputed.

    model.apply_blocks = every_k_blocks(4)

A policy is a function (blocks, x) -> output that applies the blocks of a TransformerLM in order.
All policies give the same results, but they differ in memory and time. Source: Chen et al. 2016,
"Training Deep Nets with Sublinear Memory Cost".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from systems.model import TransformerBlock, apply_in_order

# Operator of this project's kernels (see systems.kernels.flash_attention.autograd), by its name,
# because it exists only once its module is imported
FLASH_FORWARD = "cluster_sweeps::flash_forward"
ApplyBlocks = Callable[[nn.ModuleList, Tensor], Tensor]


def every_k_blocks(k: int) -> ApplyBlocks:
    """Return a policy that saves only the input of every k-th block (Chen et al., section 3).

    All other activations are recomputed in backward, for k consecutive blocks at a time.

    Raises:
        ValueError: if k is less than 1.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")

    def apply(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for start in range(0, len(blocks), k):
            x = _recomputed(partial(apply_in_order, list(blocks)[start : start + k]), x)
        return x

    return apply


def half_blocks() -> ApplyBlocks:
    """Return a policy that saves the input of attention and of feed-forward layer of each block.

    Compared with `every_k_blocks(1)`, it saves twice as many tensors of the residual stream, and
    backward recomputes only half a block at a time.

    The policy calls the halves, not the blocks, so hooks of a block do not run.
    """

    def apply(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for block in cast(Iterable[TransformerBlock], blocks):
            x = _recomputed(block.first_half, x)
            x = _recomputed(block.second_half, x)
        return x

    return apply


def nested() -> ApplyBlocks:
    """Return a policy that checkpoints recursively (Chen et al., section 4.3).

    It divides the blocks into two halves and saves the input of each half. When backward recomputes
    a half, that half is divided in the same way. With n blocks, O(log n) saved inputs are in memory
    at the same time. Each block is recomputed at most ceil(log2(n)) times (once if n is 1), and
    about half as often on average.
    """

    def halves(blocks: Sequence[nn.Module], x: Tensor) -> Tensor:
        if len(blocks) == 1:
            return _recomputed(blocks[0], x)
        middle = math.ceil(len(blocks) / 2)
        for half in (blocks[:middle], blocks[middle:]):
            x = _recomputed(partial(halves, half), x) if len(half) > 1 else halves(half, x)
        return x

    return lambda blocks, x: halves(list(blocks), x)


def selective() -> ApplyBlocks:
    """Return a policy that saves the outputs of two kinds of operations and recomputes the rest.

    The two kinds are matmuls with weights and fused attention: that of torch, `flash_triton` and
    `flash_hopper`. Backward recomputes all other operations, such as norms, RoPE, SiLU, casts, and
    attention that is not fused or no operator of torch, such as `flash_pytorch` and `flash_attn_4`
    (Korthikanti et al. 2022, section 5).
    """
    saved = {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_saved = op in saved or op.name() == FLASH_FORWARD
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)

    def apply(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for block in blocks:
            x = _recomputed(block, x, context_fn=contexts)
        return x

    return apply


def _recomputed(fn: Callable[[Tensor], Tensor], x: Tensor, **kwargs: Any) -> Tensor:
    # The model has no dropout, so the state of random generators need not be preserved.
    return checkpoint(fn, x, use_reentrant=False, preserve_rng_state=False, **kwargs)
