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
from systems.kernels.flash_attention.arguments import properties, scale_error, tensor_errors
from systems.kernels.flash_attention.autograd import autocast

_warned: set[str] = set()


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention as `torch.nn.functional.scaled_dot_product_attention` does.

    The arguments and the result are those of torch's function, so that it can be replaced:

        torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention

    `flash_attention(..., implementation="auto")` computes the result. It also uses torch's function
    for inputs that are too small for kernels launched from Python, and on devices other than a
    Hopper GPU. torch's function itself is called for a mask other than a causal one, for dropout,
    within transforms of torch.func, and for arguments that `flash_attention` does not accept, for
    example nested tensors and batch dimensions that broadcast. Errors are those of torch.
    """
    options = is_causal, scale, enable_gqa
    reason = _fallback_reason(query, key, value, attn_mask, dropout_p, *options)
    if reason is None:
        out: Tensor = flash_attention(query, key, value, is_causal, scale)
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
    is_causal: object,
    scale: object,
    enable_gqa: bool,
) -> str | None:
    if attn_mask is not None:
        return "attn_mask is given, and flash_attention has only causal masks and windows"
    if dropout_p != 0:
        return "dropout_p is not 0, and flash_attention has no dropout"
    if not all(isinstance(x, Tensor) and not x.is_nested for x in (query, key, value)):
        return "flash_attention accepts only tensors, and no nested ones"
    if torch._C._are_functorch_transforms_active():
        return "flash_attention does not support transforms of torch.func"
    if tensor_errors(*properties(*autocast(query, key, value))):
        return "flash_attention does not accept these shapes, dtypes or devices"
    if not isinstance(is_causal, bool) or scale_error(scale):
        return "flash_attention does not accept this is_causal or scale"
    if not isinstance(enable_gqa, bool) or (enable_gqa and query.dim() < 3):
        return "flash_attention does not accept this enable_gqa"
    if not enable_gqa and query.dim() > 2 and query.shape[-3] != key.shape[-3]:
        return "key has fewer heads than query, and enable_gqa is False"
    return None
