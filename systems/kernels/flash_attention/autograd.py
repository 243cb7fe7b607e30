"""FlashAttention-2 in Triton as a function that autograd knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from systems.kernels.flash_attention.launch import flash_backward, flash_forward


class FlashAttentionTriton(torch.autograd.Function):
    """`FlashAttentionTriton.apply(q, k, v, is_causal=False, scale=None, precision="tf32x3")`.

    Arguments are those of `launch.flash_forward`; returns out, (..., n_queries, head_dim). Between
    the passes q, k, v, out and the log-sum-exp live, float32 (..., n_queries): memory is linear in
    the lengths.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        scale: float | None = None,
        precision: str = "tf32x3",
    ) -> Tensor:
        out, lse = flash_forward(q, k, v, is_causal, scale, precision=precision)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.is_causal, ctx.scale, ctx.precision = is_causal, scale, precision
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        needs_dq, needs_dk, needs_dv = ctx.needs_input_grad[:3]
        dq, dk, dv = flash_backward(
            q, k, v, out, lse, grads[0], ctx.is_causal, ctx.scale, precision=ctx.precision,
            needs_dq=needs_dq, needs_dkdv=needs_dk or needs_dv,
        )  # fmt: skip
        return dq, dk, dv, None, None, None
