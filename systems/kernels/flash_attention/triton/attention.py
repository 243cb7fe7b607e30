"""The implementation flash_triton: FlashAttention-2 in Triton, as the registry lists it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from systems.kernels.device import runs_kernels
from systems.kernels.flash_attention.autograd import FlashAttentionTriton
from systems.kernels.flash_attention.features import FEATURES
from systems.kernels.flash_attention.triton.tile_table import KERNEL_DTYPES, MAX_HEAD_DIM
from systems.kernels.flash_attention.variant import NO_VARIANT, Packing, Variant

HAS = frozenset(FEATURES)


def flash_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    variant: Variant = NO_VARIANT,
    packing: Packing | None = None,
    return_lse: bool = False,
) -> Any:
    """Compute attention with FlashAttention-2 in Triton; see `FlashAttentionTriton`."""
    return FlashAttentionTriton.apply(
        q, k, v, is_causal, scale, "fp16x3", variant, packing, return_lse
    )


def triton_unsupported_reason(q: Tensor, v: Tensor) -> str | None:
    """Return the reason why flash_triton does not support these inputs, or None if it does."""
    if not runs_kernels(q.device):
        return "flash_triton needs a CUDA GPU"
    return triton_form_reason(q.dtype, max(q.shape[-1], v.shape[-1]))


def triton_form_reason(dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why flash_triton does not support a dtype or head dimension, or None if it does."""
    if dtype in KERNEL_DTYPES and head_dim <= MAX_HEAD_DIM:
        return None
    return (
        f"flash_triton needs one of the dtypes {', '.join(map(str, KERNEL_DTYPES))} and a "
        f"head_dim up to {MAX_HEAD_DIM}, got {dtype} and head_dim {head_dim}"
    )
