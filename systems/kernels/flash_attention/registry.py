"""Table of the implementations of attention, and the inputs that each implementation supports.

An implementation says in its own module which features it has, so that an edit of it does not count
as an edit of the others (see `systems.implementation_sources`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from systems.kernels.flash_attention.features import FEATURES, features
from systems.kernels.flash_attention.flash_pytorch import HAS as FLASH_PYTORCH_HAS
from systems.kernels.flash_attention.flash_pytorch import FlashAttentionPyTorch
from systems.kernels.flash_attention.hopper import forward_launch
from systems.kernels.flash_attention.hopper.attention import HAS as FLASH_HOPPER_HAS
from systems.kernels.flash_attention.hopper.attention import flash_hopper
from systems.kernels.flash_attention.naive import naive, naive_packed, naive_with_lse
from systems.kernels.flash_attention.peers.flash_attn_4 import HAS as FLASH_ATTN_4_HAS
from systems.kernels.flash_attention.peers.flash_attn_4 import (
    flash_attn_4,
    flash_attn_4_unsupported_reason,
)
from systems.kernels.flash_attention.peers.sdpa import HAS as SDPA_HAS
from systems.kernels.flash_attention.peers.sdpa import (
    SDPA_BACKENDS,
    sdpa,
    sdpa_auto,
    sdpa_unsupported_reason,
)
from systems.kernels.flash_attention.triton.attention import HAS as FLASH_TRITON_HAS
from systems.kernels.flash_attention.triton.attention import (
    flash_triton,
    triton_unsupported_reason,
)
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


# `torch.autograd.Function.apply` does not accept keyword arguments; this function does.
def flash_pytorch(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """Compute attention with FlashAttention-2 in plain torch; see `FlashAttentionPyTorch`."""
    return FlashAttentionPyTorch.apply(q, k, v, is_causal, scale)


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

# Features that each implementation has
HAS: dict[str, frozenset[str]] = {
    "naive": frozenset(FEATURES),
    "flash_pytorch": FLASH_PYTORCH_HAS,
    "flash_triton": FLASH_TRITON_HAS,
    "flash_hopper": FLASH_HOPPER_HAS,
    "flash_attn_4": FLASH_ATTN_4_HAS,
    **dict.fromkeys(("sdpa", *SDPA_BACKENDS, "flex"), SDPA_HAS),
}


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

    The result also depends on this machine, for example on its GPU. `implementation` is a key of
    ATTENTIONS. `features.features` describes the other arguments.
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
        return forward_launch.unsupported_reason(q, variant, is_packed)
    return triton_unsupported_reason(q, v) if implementation == "flash_triton" else None
