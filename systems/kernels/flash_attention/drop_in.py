"""A replacement of torch's scaled_dot_product_attention with the same arguments.

    from systems.kernels.flash_attention.drop_in import scaled_dot_product_attention

It calls `flash_attention` where `flash_attention` supports the arguments, and torch's function
otherwise. The first time that it calls torch's function for a reason, it issues a warning with the
reason.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.nn import functional

from systems.kernels.flash_attention.api import flash_attention
from systems.kernels.flash_attention.arguments import tensor_errors

_warned: set[str] = set()


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention as `torch.nn.functional.scaled_dot_product_attention` does.

    The arguments and the result are those of torch's function, so that it can be replaced:

        torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention

    `flash_attention(..., implementation="auto")` computes the result. It also uses torch's function
    for inputs that are too small for kernels launched from Python, and on devices other than a
    Hopper GPU. torch's function itself is called for a mask other than a causal one, for dropout,
    and for tensors that `flash_attention` does not accept, for example batch dimensions that
    broadcast.
    """
    reason = _fallback_reason(query, key, value, attn_mask, dropout_p, enable_gqa)
    if reason is None:
        out: Tensor = flash_attention(query, key, value, bool(is_causal), scale)
        return out
    # torch.compile does not trace warnings.
    if not torch.compiler.is_compiling() and reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            f"scaled_dot_product_attention uses torch's implementation: {reason}", stacklevel=2
        )
    return torch_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


# torch's function at the time of the import, which a caller may replace by the function above
torch_attention = functional.scaled_dot_product_attention


def _fallback_reason(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    enable_gqa: bool,
) -> str | None:
    if attn_mask is not None:
        return "attn_mask is given, and flash_attention has only causal masks and windows"
    if dropout_p:
        return "dropout_p is not 0, and flash_attention has no dropout"
    if tensor_errors(query, key, value):
        return "flash_attention does not accept these shapes, dtypes or devices"
    if query.dim() > 2 and query.shape[-3] != key.shape[-3] and not enable_gqa:
        return "key has fewer heads than query, and enable_gqa is False"
    return None
