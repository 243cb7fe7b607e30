"""FlashAttention-2 in Triton as a function that autograd knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from systems.kernels.flash_attention.configurations import DTYPES
from systems.kernels.flash_attention.launch import flash_backward, flash_forward


class FlashAttentionTriton(torch.autograd.Function):
    """`FlashAttentionTriton.apply(q, k, v, is_causal=False, scale=None, precision="bf16x6")`.

    Arguments are those of `launch.flash_forward`; returns out, (..., n_queries, head_dim). Between
    the passes q, k, v, out and the log-sum-exp live, float32 (..., n_queries): memory is linear in
    the lengths. Under autocast q, k and v are taken in its dtype, as by torch's own attention.

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
        precision: str = "bf16x6",
    ) -> Tensor:
        ctx.dtypes = q.dtype, k.dtype, v.dtype
        device_type = q.device.type
        if torch.is_autocast_enabled(device_type) and set(ctx.dtypes) <= set(DTYPES):
            dtype = torch.get_autocast_dtype(device_type)
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        if _is_watched():
            from systems.kernels.flash_attention.ops import flash_forward_op

            out, lse = flash_forward_op(q, k, v, is_causal, scale, precision)
        else:
            out, lse = flash_forward(q, k, v, is_causal, scale, precision=precision)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.is_causal, ctx.scale, ctx.precision = is_causal, scale, precision
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        needs_dq, needs_dk, needs_dv = ctx.needs_input_grad[:3]
        needs_dkdv = needs_dk or needs_dv
        dq: Tensor | None
        dk: Tensor | None
        dv: Tensor | None
        if _is_watched():
            from systems.kernels.flash_attention.ops import flash_backward_op

            dq, dk, dv = flash_backward_op(
                q, k, v, out, lse, grads[0], ctx.is_causal, ctx.scale, ctx.precision,
                needs_dq, needs_dkdv,
            )  # fmt: skip
        else:
            dq, dk, dv = flash_backward(
                q, k, v, out, lse, grads[0], ctx.is_causal, ctx.scale, precision=ctx.precision,
                needs_dq=needs_dq, needs_dkdv=needs_dkdv,
            )  # fmt: skip
        dq, dk, dv = (
            gradient.to(dtype) if needed and gradient is not None else None
            for gradient, dtype, needed in zip(
                (dq, dk, dv), ctx.dtypes, (needs_dq, needs_dk, needs_dv), strict=True
            )
        )
        return dq, dk, dv, None, None, None


def _is_watched() -> bool:
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
