"""Attention for whoever needs one: checked, with an implementation by name or the best there is.

from systems.kernels.flash_attention import flash_attention

out = flash_attention(q, k, v, is_causal=True)
"""

from __future__ import annotations

import difflib
import math
from numbers import Real

import torch
from torch import Tensor

from systems.kernels.device import is_hopper
from systems.kernels.flash_attention.autograd import autocast
from systems.kernels.flash_attention.layout import four_dimensional
from systems.kernels.flash_attention.registry import ATTENTIONS, why_not

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    implementation: str = "auto",
) -> Tensor:
    """softmax(q k^T * scale) v, differentiable by q, k and v.

    Under autocast q, k and v are taken in its dtype, whichever of 32 and 16 bits each has.

    Args:
        q: (..., n_queries, head_dim), float32, bfloat16, float16 or float64, any strides.
        k, v: (..., n_keys, head_dim), of q's leading dimensions, dtype and device.
        is_causal: query i sees keys 0 to i (aligned upper left, as in torch).
        scale: multiplies the scores; 1/sqrt(head_dim) by default.
        implementation:
            auto            on a GPU like the H200 that they were measured on (capability 9.0)
                            flash_hopper where it takes the inputs and else flash_triton; elsewhere,
                            and for inputs so small that launching them takes longer, sdpa, which is
                            fused on a GPU and on a CPU
            naive           materialises the scores, in the inputs' dtype
            flash_pytorch   FlashAttention-2 in plain torch, in float32; there to be read
            flash_triton    the same in Triton; on a CPU with TRITON_INTERPRET=1
            flash_hopper    FlashAttention-3's way for an H100 or H200: 16 bits, head_dim 64 or 128
            flex            torch's FlexAttention, compiled
            sdpa            torch's scaled_dot_product_attention, the backend that it chooses
            sdpa_flash, sdpa_cudnn, sdpa_efficient, sdpa_math
                            that backend or none

    Returns:
        (..., n_queries, head_dim), of q's dtype; 0 where there are no keys.

    Raises:
        ValueError: the arguments do not fit; the message names all that do not.
        RuntimeError: this implementation does not take these inputs on this machine.
    """
    q, k, v = autocast(q, k, v)  # what computes is chosen for what is computed
    errors = _errors(q, k, v, is_causal, scale, implementation)
    if errors:
        raise ValueError("; ".join(errors))
    leading = q.shape[:-2]
    # The form that torch's fused kernels take; what has another goes to its materialising one.
    q, k, v = (four_dimensional(x) for x in (q, k, v))
    if q.numel() == 0 or k.numel() == 0:
        implementation = "naive"  # torch 2.11's fused kernels divide by zero and end the process
    elif implementation == "auto":
        implementation = _best(q, k)
    else:
        reason = why_not(q, k, v, is_causal, implementation)
        if reason:
            others = [name for name in ATTENTIONS if not why_not(q, k, v, is_causal, name)]
            raise RuntimeError(f"{reason}; these are taken by auto, {', '.join(others)}")
    out = ATTENTIONS[implementation](q, k, v, is_causal=is_causal, scale=scale)
    return out.reshape(*leading, *out.shape[-2:])


# Forward and backward of less take the GPU less time than Python takes to launch them, and there
# torch is ahead: a call of both takes 0.19 ms by its fastest backend and 0.28 by flash_hopper, as
# logs/h200/flash has it of one head of 128 to 1,024 tokens in bf16, in the median. One head of 16k
# is 2.4e11: there flash_hopper takes the GPU 0.27 ms in place of cuDNN's 0.54. In float32 one head
# of 4k is 1.5e10: flash_triton 0.17 in place of the efficient backend's 1.36, which takes no less
# for head dimensions below 64.
LAUNCH_BOUND_FLOPS = 2e11
LAUNCH_BOUND_FLOPS_FLOAT32 = 1e10


def _best(q: Tensor, k: Tensor) -> str:
    """This project's kernels on a GPU that they were measured on, and else torch's choice."""
    is_float32 = q.dtype == torch.float32
    head_dim = max(q.shape[-1], 64) if is_float32 else q.shape[-1]
    flops = 14.0 * math.prod(q.shape[:-1]) * head_dim * k.shape[-2]
    least = LAUNCH_BOUND_FLOPS_FLOAT32 if is_float32 else LAUNCH_BOUND_FLOPS
    if flops < least or not q.is_cuda:
        return "sdpa"
    if is_hopper(q.device):
        for name in ("flash_hopper", "flash_triton"):
            if why_not(q, q, q, False, name) is None:
                return name
    return "sdpa"


def _errors(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float | None, implementation: str
) -> list[str]:
    errors = []
    if implementation != "auto" and implementation not in ATTENTIONS:
        valid = ["auto", *ATTENTIONS]
        close = difflib.get_close_matches(str(implementation), valid, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        errors.append(
            f"implementation: given {implementation!r}; {hint}valid are {', '.join(valid)}"
        )
    shapes = [tuple(x.shape) for x in (q, k, v)]
    if (
        q.ndim < 2
        or k.shape != v.shape
        or q.shape[:-2] != k.shape[:-2]
        or q.shape[-1:] != k.shape[-1:]
        or q.shape[-1] == 0
    ):
        errors.append(
            "q must be (..., n_queries, head_dim), k and v (..., n_keys, head_dim), with equal "
            f"leading dimensions and head_dim 1 or more; given {', '.join(map(str, shapes))}"
        )
    dtypes = [x.dtype for x in (q, k, v)]
    if len(set(dtypes)) > 1 or q.dtype not in DTYPES:
        errors.append(
            f"q, k and v must be of one dtype among {', '.join(map(str, DTYPES))}; "
            f"given {', '.join(map(str, dtypes))}"
        )
    devices = [x.device for x in (q, k, v)]
    if len(set(devices)) > 1:
        errors.append(
            f"q, k and v must be on one device; given {', '.join(str(d) for d in devices)}"
        )
    if not isinstance(is_causal, bool):
        errors.append(
            f"is_causal must be True or False, there is no other mask; given {_told(is_causal)}"
        )
    if scale is not None and (not isinstance(scale, Real) or not math.isfinite(scale)):
        errors.append(f"scale must be a finite number, which has no gradient; given {_told(scale)}")
    return errors


def _told(x: object) -> str:
    return f"a tensor of {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
