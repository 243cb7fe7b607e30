r"""The hooks of the tests of CS336, assignment 2 (Systems), filled in with this project's classes.

The tests of the assignment call the code of a student through functions in `tests/adapters.py`.
This file defines these functions for the editions of 2025 and 2026. With this project installed,
copy the file to `tests/adapters.py` of the assignment. README.md beside this file has the commands.

Editions 2025 and 2026:

- get_flashattention_autograd_function_pytorch: the class FlashAttentionPyTorch
- get_flashattention_autograd_function_triton: the class FlashAttentionTriton
- get_sharded_optimizer: a ShardedOptimizer

Edition 2025:

- get_ddp_individual_parameters: an OverlappedDDP
- ddp_individual_parameters_on_after_backward: its finish_gradient_synchronization()
- get_ddp_bucketed: a BucketedDDP
- ddp_bucketed_on_after_backward: its finish_gradient_synchronization()
- ddp_bucketed_on_train_batch_start: nothing to do

Edition 2026:

- get_ddp: an OverlappedDDP
- ddp_on_after_backward: its finish_gradient_synchronization()
- get_fsdp: a FullyShardedDataParallel
- fsdp_on_after_backward: its finish_gradient_synchronization()
- fsdp_gather_full_params: its gather_full_parameters()

The weighted sum of the assignment has no hook. `systems.kernels.weighted_sum` computes it.

The hooks can also be checked and measured like any code outside this project. Run these commands in
the folder `examples/`. No GPU is needed:

    python -m jobs check cs336/adapters.py:get_fsdp
    python -m jobs.submit sweeps/cpu/ddp.yaml --local --out logs/cs336 \
        'strategy=[naive, cs336/adapters.py:get_ddp]'
    python -m aggregate logs/cs336
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from systems.kernels.flash_attention import FlashAttentionPyTorch, FlashAttentionTriton
from systems.parallel import (
    BucketedDDP,
    FullyShardedDataParallel,
    OverlappedDDP,
    ShardedOptimizer,
)


def get_flashattention_autograd_function_pytorch() -> type[torch.autograd.Function]:
    """Return the class `FlashAttentionPyTorch`: attention in tiles, without Triton.

    Its `apply(q, k, v, is_causal)` takes q (batch, n_queries, head_dim) and k, v (batch, n_keys,
    head_dim), and returns (batch, n_queries, head_dim) in the dtype of q. It saves one tensor of
    shape (batch, n_queries), the log-sum-exp in float32. Editions 2025 and 2026.
    """
    return FlashAttentionPyTorch


def get_flashattention_autograd_function_triton() -> type[torch.autograd.Function]:
    """Return the class `FlashAttentionTriton`: attention with Triton kernels, forward and backward.

    Shapes, dtypes and saved tensors are those of the PyTorch hook. The tensors must be on a GPU, or
    on the CPU with TRITON_INTERPRET=1. Editions 2025 and 2026.
    """
    return FlashAttentionTriton


def get_ddp_individual_parameters(module: nn.Module) -> OverlappedDDP:
    """Return the module in `OverlappedDDP`: one all-reduce per parameter, during backward.

    The parameters and buffers of all ranks become those of rank 0. Edition 2025.
    """
    return OverlappedDDP(module)


def ddp_individual_parameters_on_after_backward(
    ddp_model: OverlappedDDP, optimizer: torch.optim.Optimizer
) -> None:
    """Wait for the all-reduces: every gradient becomes its mean over the ranks. Edition 2025.

    Args:
        optimizer: not used.
    """
    ddp_model.finish_gradient_synchronization()


def get_ddp_bucketed(module: nn.Module, bucket_size_mb: float | None) -> BucketedDDP:
    """Return the module in `BucketedDDP`: one all-reduce per bucket of gradients. Edition 2025.

    Args:
        module: module whose parameters and buffers become those of rank 0.
        bucket_size_mb: maximum size of a bucket, in 10^6 bytes. With None, a bucket may have any
            size.
    """
    return BucketedDDP(module, math.inf if bucket_size_mb is None else bucket_size_mb)


def ddp_bucketed_on_after_backward(
    ddp_model: BucketedDDP, optimizer: torch.optim.Optimizer
) -> None:
    """Wait for the all-reduces: every gradient becomes its mean over the ranks. Edition 2025.

    Args:
        optimizer: not used.
    """
    ddp_model.finish_gradient_synchronization()


def ddp_bucketed_on_train_batch_start(
    ddp_model: BucketedDDP, optimizer: torch.optim.Optimizer
) -> None:
    """Do nothing: `BucketedDDP` is ready for a step when the previous one ends. Edition 2025."""


def get_ddp(module: nn.Module) -> OverlappedDDP:
    """Return the module in `OverlappedDDP`, as `get_ddp_individual_parameters`. Edition 2026."""
    return OverlappedDDP(module)


def ddp_on_after_backward(ddp_model: OverlappedDDP, optimizer: torch.optim.Optimizer) -> None:
    """Wait for the all-reduces: every gradient becomes its mean over the ranks. Edition 2026.

    Args:
        optimizer: not used.
    """
    ddp_model.finish_gradient_synchronization()


def get_fsdp(
    module: nn.Module, compute_dtype: torch.dtype | None = None
) -> FullyShardedDataParallel:
    """Return the module in `FullyShardedDataParallel`: large weights are sharded. Edition 2026.

    The weights of Linear and Embedding layers become flat shards, one per rank. Other parameters,
    for example of norms, are replicated. Shards, replicated parameters and gradients are float32
    (float64 if the parameter is).

    Args:
        module: module whose parameters and buffers become those of rank 0.
        compute_dtype: dtype of communication and computation. None keeps the dtype of each
            parameter.
    """
    return FullyShardedDataParallel(module, compute_dtype)


def fsdp_on_after_backward(
    fsdp_model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer
) -> None:
    """Wait for the reduce-scatters, and average the replicated gradients. Edition 2026.

    Args:
        optimizer: not used.
    """
    fsdp_model.finish_gradient_synchronization()


def fsdp_gather_full_params(fsdp_model: FullyShardedDataParallel) -> dict[str, Tensor]:
    """Return all parameters unsharded, by their names in the module before wrapping. Edition 2026.

    The dtype is that of the shards. A tied parameter appears under each of its names. All ranks
    must call this function.
    """
    return fsdp_model.gather_full_parameters()


def get_sharded_optimizer(
    params: ParamsT, optimizer_cls: type[torch.optim.Optimizer], **kwargs: Any
) -> ShardedOptimizer:
    """Return a `ShardedOptimizer`: each rank updates some parameters and broadcasts them.

    Editions 2025 and 2026.

    Args:
        params: parameters or parameter groups, with the same values on all ranks.
    """
    return ShardedOptimizer(params, optimizer_cls, **kwargs)
