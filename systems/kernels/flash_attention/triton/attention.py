"""The implementation flash_triton: FlashAttention-2 in Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from systems.kernels.device import runs_kernels
from systems.kernels.flash_attention.autograd import FlashAttentionTriton
from systems.kernels.flash_attention.call import FEATURES, Call, Implementation
from systems.kernels.flash_attention.triton.tile_table import KERNEL_DTYPES, MAX_HEAD_DIM


def unsupported_reason(q: Tensor, k: Tensor, v: Tensor, call: Call) -> str | None:
    """Return the reason why flash_triton does not support a call, or None if it does."""
    if not runs_kernels(q.device):
        return "flash_triton needs a CUDA GPU"
    return form_reason(q.dtype, q.shape[-1], v.shape[-1])


def form_reason(dtype: torch.dtype, head_dim: int, value_dim: int) -> str | None:
    """Return why flash_triton does not support a dtype or head dimensions, or None if it does."""
    head_dim = max(head_dim, value_dim)
    if dtype in KERNEL_DTYPES and head_dim <= MAX_HEAD_DIM:
        return None
    return (
        f"flash_triton needs one of the dtypes {', '.join(map(str, KERNEL_DTYPES))} and a "
        f"head_dim up to {MAX_HEAD_DIM}, got {dtype} and head_dim {head_dim}"
    )


IMPLEMENTATIONS = {
    "flash_triton": Implementation(
        FlashAttentionTriton.apply, frozenset(FEATURES), unsupported_reason, form_reason,
        "CUDA GPU", any_scale=True,
    )
}  # fmt: skip
