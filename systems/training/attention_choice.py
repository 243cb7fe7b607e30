"""Selects an attention function by the value of a benchmark parameter."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from systems.benchmark import Unsupported
from systems.external.reference import is_reference
from systems.kernels.flash_attention import ATTENTIONS, unsupported_reason
from systems.kernels.flash_attention.external import ExternalAttention
from systems.kernels.flash_attention.features import features
from systems.kernels.flash_attention.variant import NO_VARIANT, Variant


def attention_function(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    variant: Variant = NO_VARIANT,
    is_packed: bool = False,
) -> Callable[..., Tensor]:
    """Return the attention function with this name, for inputs such as q, k and v.

    The name is a key of `systems.kernels.flash_attention.ATTENTIONS`, or a reference such as
    `my_kernels/flash.py:MyFlash` to a function outside this project, which has only a causal mask.
    The function is called as (q, k, v, is_causal=...).

    q, k and v are (batch, heads, seq_len, head_dim) and may be uninitialized. For variant and
    is_packed, see `flash_attention.registry.unsupported_reason`.

    Raises:
        Unsupported: if the implementation does not support these inputs on this machine.
        BadReference: if the reference does not name an attention function.
    """
    if not is_reference(name):
        reason = unsupported_reason(q, k, v, is_causal, name, variant, is_packed)
        if reason:
            raise Unsupported(reason)
        return ATTENTIONS[name]
    needed = features(q, k, v, is_causal, variant, is_packed)
    if needed:
        raise Unsupported(
            f"{name} is called with q, k, v and is_causal only, so it cannot be measured with "
            f"{', '.join(needed)}"
        )
    attention = ExternalAttention(name)
    reason = attention.unsupported_reason(is_causal)
    if reason:
        raise Unsupported(reason)
    try:
        attention.find_shape(q, is_causal)
    except NotImplementedError as error:
        raise Unsupported(f"{name}: {error}") from error
    return attention
