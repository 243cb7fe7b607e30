"""Table of the implementations of attention, and the inputs that each implementation supports."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from systems.kernels.device import runs_kernels
from systems.kernels.flash_attention.autograd import FlashAttentionHopper, FlashAttentionTriton
from systems.kernels.flash_attention.flash_pytorch import FlashAttentionPyTorch
from systems.kernels.flash_attention.hopper import forward_launch
from systems.kernels.flash_attention.naive import naive, naive_packed, naive_with_lse
from systems.kernels.flash_attention.peers.flash_attn_4 import (
    flash_attn_4,
    flash_attn_4_unsupported_reason,
)
from systems.kernels.flash_attention.peers.sdpa import (
    SDPA_BACKENDS,
    sdpa,
    sdpa_auto,
    sdpa_unsupported_reason,
)
from systems.kernels.flash_attention.triton.tile_table import KERNEL_DTYPES, MAX_HEAD_DIM
from systems.kernels.flash_attention.variant import NO_VARIANT, Packing, Variant


def flex(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """Compute attention with torch's FlexAttention; see the function `flex` of the module `flex`.

    The module `flex` is imported on the first call instead of at the top of this file, because it
    imports torch's compiler.
    """
    from systems.kernels.flash_attention.peers.flex import flex

    return flex(q, k, v, is_causal, scale)


# `torch.autograd.Function.apply` does not accept keyword arguments; the next three functions do.
def flash_pytorch(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """Compute attention with FlashAttention-2 in plain torch; see `FlashAttentionPyTorch`."""
    return FlashAttentionPyTorch.apply(q, k, v, is_causal, scale)


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


def flash_hopper(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    return_lse: bool = False,
) -> Any:
    """Compute attention with FlashAttention-3 on a Hopper GPU; see `FlashAttentionHopper`."""
    return FlashAttentionHopper.apply(q, k, v, is_causal, scale, return_lse)


def naive_with_options(
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
    """Compute attention with the functions of the module `naive`."""
    if packing is not None:
        result = naive_packed(q, k, v, packing, is_causal, scale, variant)
    elif variant == NO_VARIANT and not return_lse:
        return naive(q, k, v, is_causal, scale)
    else:
        result = naive_with_lse(q, k, v, is_causal, scale, variant)
    return result if return_lse else result[0]


# Functions (q, k, v, is_causal=..., scale=...) -> out of tensors (batch, heads, seq_len, head_dim).
# `api.flash_attention` also checks its inputs and accepts other leading dimensions.
ATTENTIONS: dict[str, Callable[..., Any]] = {
    "naive": naive_with_options,
    "flash_pytorch": flash_pytorch,
    "flash_triton": flash_triton,
    "flash_hopper": flash_hopper,
    "flash_attn_4": flash_attn_4,
    "sdpa": sdpa_auto,  # the backend that torch chooses
    "flex": flex,
    **{name: partial(sdpa, implementation=name) for name in SDPA_BACKENDS},
}

# Features beyond a causal mask and a scale
GROUPED, VALUE_DIM, WINDOW, LOWER_RIGHT, SOFTCAP, LSE, PACKED = FEATURES = (
    "grouped heads", "another head dimension of v", "windows", "lower-right alignment", "softcap",
    "log-sum-exp", "packed sequences",
)  # fmt: skip
# Features that each implementation has
HAS: dict[str, frozenset[str]] = {
    "naive": frozenset(FEATURES),
    "flash_pytorch": frozenset({VALUE_DIM}),
    "flash_triton": frozenset(FEATURES),
    "flash_hopper": frozenset({GROUPED, LSE}),
    "flash_attn_4": frozenset(FEATURES) - {LSE},
    "flex": frozenset({GROUPED, VALUE_DIM}),
    **dict.fromkeys(("sdpa", *SDPA_BACKENDS), frozenset({GROUPED, VALUE_DIM})),
}


def features(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    variant: Variant = NO_VARIANT,
    is_packed: bool = False,
    return_lse: bool = False,
) -> list[str]:
    """Return the features of FEATURES that a call of attention needs.

    Args:
        q, k, v: (batch, heads, seq_len, head_dim), or with is_packed (heads, rows, head_dim).
        is_causal, variant, return_lse: see `api.flash_attention`.
        is_packed: whether the rows belong to packed sequences.
    """
    mask = variant.mask(is_causal)
    has_window = variant.window_left is not None or variant.window_right is not None
    # Without packing, equal lengths make both alignments the same.
    shifts = mask.lower_right and (is_packed or q.shape[-2] != k.shape[-2])
    needs = (
        q.shape[-3] != k.shape[-3], q.shape[-1] != v.shape[-1], has_window, shifts,
        variant.softcap is not None, return_lse, is_packed,
    )  # fmt: skip
    return [feature for feature, needed in zip(FEATURES, needs, strict=True) if needed]


def unsupported_reason(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    implementation: str,
    variant: Variant = NO_VARIANT,
    is_packed: bool = False,
    return_lse: bool = False,
) -> str | None:
    """Return the reason why an implementation does not support these inputs, or None if it does.

    The result also depends on this machine, for example on its GPU.

    Args:
        q, k, v: (batch, heads, seq_len, head_dim), or with is_packed (heads, rows, head_dim).
        is_causal: whether attention has a causal mask.
        implementation: name of the implementation, a key of the table ATTENTIONS.
        variant, is_packed, return_lse: see `features`.
    """
    needed = features(q, k, v, is_causal, variant, is_packed, return_lse)
    missing = [feature for feature in needed if feature not in HAS[implementation]]
    if missing:
        return f"{implementation} does not support {', '.join(missing)}"
    if implementation in SDPA_BACKENDS:
        return sdpa_unsupported_reason(q, k, v, is_causal, implementation)
    if implementation == "flex":
        from systems.kernels.flash_attention.peers.flex import flex_unsupported_reason

        return flex_unsupported_reason(q)
    if implementation == "flash_attn_4":
        return flash_attn_4_unsupported_reason(q, k, v, is_causal, variant, is_packed)
    if implementation == "flash_hopper":
        return forward_launch.unsupported_reason(q)
    return _triton_unsupported_reason(q, v) if implementation == "flash_triton" else None


def _triton_unsupported_reason(q: Tensor, v: Tensor) -> str | None:
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
