"""The kernels of this package as functions that autograd knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from systems.kernels.flash_attention import dispatch
from systems.kernels.flash_attention.configurations import DTYPES


class FlashAttentionTriton(torch.autograd.Function):
    """`FlashAttentionTriton.apply(q, k, v, is_causal=False, scale=None, precision="fp16x3")`.

    Arguments are those of `launch.flash_forward`; returns out, (..., n_queries, head_dim). Between
    the passes q, k, v, out and the log-sum-exp live, float32 (..., n_queries): memory is linear in
    the lengths. Equal inputs give equal bits, backward too. Under autocast q, k and v are taken in
    its dtype, as by torch's own attention.

    Compiled, or under a mode that watches operations, it is two ops (`ops`); else it launches at
    once, which spares the host some 20 microseconds a pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        scale: float | None = None,
        precision: str = "fp16x3",
    ) -> Tensor:
        return _forward(ctx, q, k, v, is_causal, scale, precision, "triton")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*_backward(ctx, grads[0]), None, None, None)


class FlashAttentionHopper(torch.autograd.Function):
    """`FlashAttentionHopper.apply(q, k, v, is_causal=False, scale=None)`: the same for 16-bit q, k
    and v of 64 or 128 dimensions on an H100 or H200, by kernels whose warps have roles.

    dq is added up in an order that changes from run to run, in float32: equal inputs give gradients
    that differ by its rounding. Under `torch.use_deterministic_algorithms(True)` backward is
    `FlashAttentionTriton`'s, whose bits are equal.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        return _forward(ctx, q, k, v, is_causal, scale, "fp16x3", "hopper")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*_backward(ctx, grads[0]), None, None)


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In the dtype of the autocast they are under, as torch's own attention takes them."""
    device_type = q.device.type
    if q.is_meta or not torch.is_autocast_enabled(device_type):  # which knows no meta
        return q, k, v
    if not {q.dtype, k.dtype, v.dtype} <= set(DTYPES):
        return q, k, v
    dtype = torch.get_autocast_dtype(device_type)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _forward(
    ctx: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float | None,
    precision: str,
    kernels: str,
) -> Tensor:
    ctx.dtypes = q.dtype, k.dtype, v.dtype
    q, k, v = autocast(q, k, v)
    if _is_watched():
        from systems.kernels.flash_attention.ops import flash_forward_op

        out, lse = flash_forward_op(q, k, v, is_causal, scale, precision, kernels)
    else:
        out, lse = dispatch.forward(q, k, v, is_causal, scale, precision, kernels)
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.options = is_causal, scale, precision, kernels
    return out


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    needs_dq, needs_dk, needs_dv = ctx.needs_input_grad[:3]
    needs = needs_dq, needs_dk or needs_dv
    given = (*ctx.saved_tensors, dout, *ctx.options, *needs)
    gradients: tuple[Tensor | None, ...]
    if _is_watched():
        from systems.kernels.flash_attention.ops import flash_backward_op

        gradients = flash_backward_op(*given)
    else:
        gradients = dispatch.backward(*given)
    return tuple(
        gradient.to(dtype) if needed and gradient is not None else None
        for gradient, dtype, needed in zip(
            gradients, ctx.dtypes, (needs_dq, needs_dk, needs_dv), strict=True
        )
    )


def _is_watched() -> bool:
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
