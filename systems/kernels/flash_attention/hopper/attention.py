"""The implementation flash_hopper: FlashAttention-3 for Hopper GPUs, as the registry lists it."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from systems.kernels.flash_attention.autograd import FlashAttentionHopper
from systems.kernels.flash_attention.features import FEATURES, VALUE_DIM
from systems.kernels.flash_attention.variant import NO_VARIANT, Packing, Variant

HAS = frozenset(FEATURES) - {VALUE_DIM}


def flash_hopper(
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
    """Compute attention with FlashAttention-3 on a Hopper GPU; see `FlashAttentionHopper`."""
    return FlashAttentionHopper.apply(q, k, v, is_causal, scale, return_lse, variant, packing)
