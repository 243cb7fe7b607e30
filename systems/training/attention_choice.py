"""Selects an attention function by the value of a benchmark parameter."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from systems.benchmark import Unsupported
from systems.external.reference import is_reference
from systems.kernels.flash_attention import ATTENTIONS, unsupported_reason
from systems.kernels.flash_attention.external import ExternalAttention


def attention_function(
    name: str, q: Tensor, k: Tensor, v: Tensor, is_causal: bool
) -> Callable[..., Tensor]:
    """Return the attention function with this name, for inputs such as q, k and v.

    Args:
        name: key of `systems.kernels.flash_attention.ATTENTIONS`, or a reference to a function
            outside this project, such as `my_kernels/flash.py:MyFlash`.
        q, k, v: inputs of shape (batch, heads, seq_len, head_dim). They may be uninitialized.
        is_causal: whether attention has a causal mask.

    Returns:
        A function `(q, k, v, is_causal=...)`.

    Raises:
        Unsupported: if the implementation does not support these inputs on this machine.
        BadReference: if the reference does not name an attention function.
    """
    if not is_reference(name):
        reason = unsupported_reason(q, k, v, is_causal, name)
        if reason:
            raise Unsupported(reason)
        return ATTENTIONS[name]
    attention = ExternalAttention(name)
    reason = attention.unsupported_reason(is_causal)
    if reason:
        raise Unsupported(reason)
    attention.find_shape(q, is_causal)
    return attention
