"""Attention function that checks its inputs and selects an implementation.

Example:

    from systems.kernels.flash_attention import flash_attention

    out = flash_attention(q, k, v, is_causal=True)
"""

from __future__ import annotations

import difflib
import math
from numbers import Real

import torch
from torch import Tensor

from systems.kernels.flash_attention.auto import best_implementation
from systems.kernels.flash_attention.autograd import autocast
from systems.kernels.flash_attention.layout import four_dimensional
from systems.kernels.flash_attention.registry import ATTENTIONS, unsupported_reason
from systems.kernels.flash_attention.triton.tile_table import KERNEL_DTYPES
from systems.kernels.flash_attention.validation import qkv_errors

DTYPES = (*KERNEL_DTYPES, torch.float64)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Compute softmax(q k^T * scale) v, differentiable with respect to q, k and v.

    Under autocast, float32, bfloat16 and float16 inputs are cast to the autocast dtype. In this
    case, q, k and v may have different dtypes.

    Args:
        q: (..., n_queries, head_dim), float32, bfloat16, float16 or float64, any strides.
        k, v: (..., n_keys, head_dim), with the leading dimensions, dtype and device of q.
        is_causal: if True, query i attends only to keys 0 to i (the mask is aligned to the upper
            left corner, as in torch).
        scale: multiplies the scores; 1/sqrt(head_dim) by default.
        implementation:
            auto            for large inputs on a Hopper GPU (compute capability 9.0): flash_hopper,
                            or flash_triton if only flash_triton supports the inputs. Otherwise
                            sdpa, for example on other devices, for float64, and for small inputs,
                            whose time is mostly launch overhead
            naive           attention with the full score matrix in memory, in the inputs' dtype
            flash_pytorch   FlashAttention-2 in plain torch, written for readers; computes in
                            float32, or in float64 for float64 inputs
            flash_triton    FlashAttention-2 in Triton, on a GPU; with TRITON_INTERPRET=1 also on a
                            CPU
            flash_hopper    FlashAttention-3 on an H100 or H200, for bfloat16 or float16 inputs and
                            head_dim 64 or 128
            flex            torch's FlexAttention, compiled
            sdpa            torch's scaled_dot_product_attention; torch selects the backend
            sdpa_flash, sdpa_cudnn, sdpa_efficient, sdpa_math
                            torch's scaled_dot_product_attention with the named backend only

    Returns:
        (..., n_queries, head_dim), of q's dtype (under autocast: after the cast); zeros if
        n_keys is 0.

    Raises:
        ValueError: if arguments are invalid; the message lists all errors.
        RuntimeError: if the implementation does not support these inputs on this machine.
    """
    q, k, v = autocast(q, k, v)  # first, because the code below depends on the dtype
    errors = _errors(q, k, v, is_causal, scale, implementation)
    if errors:
        raise ValueError("; ".join(errors))
    leading = q.shape[:-2]
    # torch's fused kernels support only four dimensions. For other numbers of dimensions, torch
    # materializes the score matrix.
    q, k, v = (four_dimensional(x) for x in (q, k, v))
    if q.numel() == 0 or k.numel() == 0:
        implementation = "naive"  # torch 2.11's fused kernels crash the process on empty inputs
    elif implementation == "auto":
        implementation = best_implementation(q, k)
    else:
        reason = unsupported_reason(q, k, v, is_causal, implementation)
        if reason:
            others = [
                name for name in ATTENTIONS if not unsupported_reason(q, k, v, is_causal, name)
            ]
            raise RuntimeError(
                f"{reason}; implementations that support these inputs: auto, {', '.join(others)}"
            )
    out = ATTENTIONS[implementation](q, k, v, is_causal=is_causal, scale=scale)
    return out.reshape(*leading, *out.shape[-2:])


def _errors(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None, implementation: str
) -> list[str]:
    errors = []
    if implementation != "auto" and implementation not in ATTENTIONS:
        valid = ["auto", *ATTENTIONS]
        close = difflib.get_close_matches(str(implementation), valid, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        errors.append(
            f"implementation must be one of {', '.join(valid)}, got {implementation!r}{hint}"
        )
    errors += qkv_errors(
        (q.shape, k.shape, v.shape),
        (q.dtype, k.dtype, v.dtype),
        (q.device, k.device, v.device),
        DTYPES,
    )
    if not isinstance(is_causal, bool):
        errors.append(
            "is_causal must be True or False (other masks are not supported), got "
            f"{_describe(is_causal)}"
        )
    if scale is not None and (not isinstance(scale, Real) or not math.isfinite(scale)):
        errors.append(
            "scale must be a finite number, not a tensor (scale gets no gradient), got "
            f"{_describe(scale)}"
        )
    return errors


def _describe(x: object) -> str:
    return f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
