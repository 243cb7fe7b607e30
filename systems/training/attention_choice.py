"""Selects an attention function by the value of a benchmark parameter."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from systems.benchmark import Unsupported
from systems.external.attention import ExternalAttention
from systems.external.reference import is_reference
from systems.kernels.flash_attention.call import PLAIN, Call, features
from systems.kernels.flash_attention.implementations import ATTENTIONS, unsupported_reason


def attention_function(
    name: str, q: Tensor, k: Tensor, v: Tensor, call: Call = PLAIN
) -> Callable[..., Tensor]:
    """Return the attention function with this name, for inputs such as q, k and v.

    The name is a key of `flash_attention.ATTENTIONS`, or a reference such as
    `my_kernels/flash.py:MyFlash` to a function outside this project, whose only feature is a causal
    mask. The function is called as (q, k, v, is_causal), and makes the given call with this mask.
    q, k and v are (batch, heads, seq_len, head_dim) and may be uninitialized.

    Raises:
        Unsupported: if the implementation does not support these inputs on this machine.
        BadReference: if the reference does not name an attention function.
    """
    if not is_reference(name):
        reason = unsupported_reason(q, k, v, name, call)
        if reason:
            raise Unsupported(reason)
        return implementation(name, call)
    needed = features(q, k, v, call)
    if needed:
        raise Unsupported(
            f"{name} is called with q, k, v and is_causal only, so it cannot be measured with "
            f"{', '.join(needed)}"
        )
    attention = ExternalAttention(name)
    reason = attention.unsupported_reason(call.is_causal)
    if reason:
        raise Unsupported(reason)
    try:
        attention.find_shape(q, call.is_causal)
    except NotImplementedError as error:
        raise Unsupported(f"{name}: {error}") from error
    return attention


def implementation(name: str, call: Call = PLAIN) -> Callable[..., Tensor]:
    """Return the function of `ATTENTIONS` with this name as a function (q, k, v, is_causal)."""
    attend = ATTENTIONS[name].attend
    calls = {is_causal: call._replace(is_causal=is_causal) for is_causal in (False, True)}

    def attention(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        out: Tensor = attend(q, k, v, calls[is_causal])
        return out

    return attention
