"""torch.autograd.Function classes for attention with the Triton kernels and the Hopper kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from systems.kernels.flash_attention import kernel_choice
from systems.kernels.flash_attention.triton.tile_table import KERNEL_DTYPES


class FlashAttentionTriton(torch.autograd.Function):
    """FlashAttention-2 with the Triton kernels, differentiable with respect to q, k and v.

        out = FlashAttentionTriton.apply(q, k, v, is_causal, scale, precision)

    The last three arguments are optional. The defaults are is_causal=False, scale=None, which means
    1/sqrt(head_dim), and precision="fp16x3". With "fp16x3", each matmul of float32 inputs consists
    of three float16 matmuls, which together are as accurate as float32.
    `triton.launch.flash_forward` describes all arguments. The output has the shape (..., n_queries,
    head_dim).

    Forward saves q, k, v, the output and the log-sum-exp for backward. The saved memory is
    therefore linear in the sequence lengths. Equal inputs give bitwise equal outputs and gradients.
    Under autocast, q, k and v are cast to the autocast dtype, as in torch's
    scaled_dot_product_attention.

    Under torch.compile or a torch dispatch mode, the kernels are launched by the custom operators
    of the module `ops`. Otherwise, they are launched directly, which saves about 20 microseconds of
    host time per pass.
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
    """FlashAttention-3 with the Hopper kernels, differentiable with respect to q, k and v.

        out = FlashAttentionHopper.apply(q, k, v, is_causal, scale)

    The arguments and the output are those of `FlashAttentionTriton`, without precision. The class
    needs an H100 or H200, bfloat16 or float16 inputs, and head_dim 64 or 128.

    Backward uses the Triton kernels, which are deterministic, in two cases: under
    `torch.use_deterministic_algorithms(True)`, and if q does not need a gradient or neither k nor v
    needs one. In all other cases, backward uses Hopper kernels. They add up dq in float32 in an
    order that changes from call to call, so the rounding errors of dq also change.
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
    """Return q, k and v, cast to the autocast dtype if autocast is enabled for their device.

    The tensors are returned unchanged if the dtype of any of them is not float32, bfloat16 or
    float16.
    """
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
