"""Autograd functions for the Triton and the Hopper kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from systems.kernels.flash_attention import kernel_choice
from systems.kernels.flash_attention.triton.tile_table import KERNEL_DTYPES


class FlashAttentionTriton(torch.autograd.Function):
    """FlashAttention-2 by the Triton kernels.

        out = FlashAttentionTriton.apply(q, k, v, is_causal, scale, precision)

    The defaults are is_causal=False, scale=None and precision="fp16x3". Arguments are described at
    `triton.launch.flash_forward`. out is (..., n_queries, head_dim).

    Saves q, k, v, out and the log-sum-exp, float32 (..., n_queries), for backward, so memory is
    linear in the sequence lengths. Equal inputs give bitwise equal results, also in backward. Under
    autocast q, k and v are cast to the autocast dtype, as in torch's own attention.

    Calls the custom operators of `ops` under torch.compile or a dispatch mode. Otherwise launches
    directly, which saves about 20 microseconds of host time per pass.
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
    """FlashAttention-3 by the warp-specialized Hopper kernels.

        out = FlashAttentionHopper.apply(q, k, v, is_causal, scale)

    Like `FlashAttentionTriton`, for bfloat16 or float16 q, k and v with head_dim 64 or 128 on an
    H100 or H200.

    Backward accumulates dq in float32 in an order that changes from run to run, so dq differs
    between runs by rounding errors. Under `torch.use_deterministic_algorithms(True)` backward uses
    the kernels of `FlashAttentionTriton`, which are deterministic.
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
    """Cast q, k and v to the autocast dtype if autocast is enabled, as torch's attention does."""
    device_type = q.device.type
    # torch.is_autocast_enabled raises an error for the meta device.
    if q.is_meta or not torch.is_autocast_enabled(device_type):
        return q, k, v
    if not {q.dtype, k.dtype, v.dtype} <= set(KERNEL_DTYPES):
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
    if _needs_custom_op():
        from systems.kernels.flash_attention.ops import flash_forward_op

        out, lse = flash_forward_op(q, k, v, is_causal, scale, precision, kernels)
    else:
        out, lse = kernel_choice.forward(q, k, v, is_causal, scale, precision, kernels)
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.options = is_causal, scale, precision, kernels
    return out


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    needs_dq, needs_dk, needs_dv = ctx.needs_input_grad[:3]
    needs = needs_dq, needs_dk or needs_dv
    args = (*ctx.saved_tensors, dout, *ctx.options, *needs)
    gradients: tuple[Tensor | None, ...]
    if _needs_custom_op():
        from systems.kernels.flash_attention.ops import flash_backward_op

        gradients = flash_backward_op(*args)
    else:
        gradients = kernel_choice.backward(*args)
    return tuple(
        gradient.to(dtype) if needed and gradient is not None else None
        for gradient, dtype, needed in zip(
            gradients, ctx.dtypes, (needs_dq, needs_dk, needs_dv), strict=True
        )
    )


def _needs_custom_op() -> bool:
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
