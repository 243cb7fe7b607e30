"""torch.autograd.Function classes for attention with the Triton kernels and the Hopper kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from systems.kernels.flash_attention import kernel_choice
from systems.kernels.flash_attention.triton.tile_table import KERNEL_DTYPES
from systems.kernels.flash_attention.variant import NO_VARIANT, Packing, Variant


class FlashAttentionTriton(torch.autograd.Function):
    """FlashAttention-2 with the Triton kernels, differentiable with respect to q, k and v.

        out = FlashAttentionTriton.apply(q, k, v, is_causal, scale, precision)
        out, lse = FlashAttentionTriton.apply(
            q, k, v, is_causal, scale, precision, variant, packing, True
        )

    The arguments after v are optional. The defaults are is_causal=False, scale=None, which means
    1/sqrt(head_dim), precision="fp16x3", no variant, no packing, and return_lse=False. With
    "fp16x3", each matmul of float32 inputs consists of three float16 matmuls, which together are as
    accurate as float32. `triton.launch.flash_forward` describes all arguments. The output has the
    shape (..., n_queries, value_dim). With return_lse=True, the log-sum-exp of the scores is also
    returned, float32 (..., n_queries), and it is differentiable.

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
        variant: Variant = NO_VARIANT,
        packing: Packing | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        options = is_causal, scale, precision, "triton"
        return _forward(ctx, q, k, v, options, variant, packing, return_lse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*_backward(ctx, *grads), *[None] * 6)


class FlashAttentionHopper(torch.autograd.Function):
    """FlashAttention-3 with the Hopper kernels, differentiable with respect to q, k and v.

        out = FlashAttentionHopper.apply(q, k, v, is_causal, scale)
        out, lse = FlashAttentionHopper.apply(q, k, v, is_causal, scale, True, variant, packing)

    The arguments after v are optional, and they and the outputs are those of
    `FlashAttentionTriton`, without precision. The class needs an H100 or H200, bfloat16 or float16
    inputs, and as head_dim a multiple of 8 from 64 to 256. That of v must be the same, or 128 if
    that of q and k is above 128. With packed sequences, head_dim must be 64, 128, 192 or 256. A
    softcap must be at most 512.

    Backward uses the Triton kernels if q does not need a gradient or neither k nor v needs one.
    Otherwise, it uses Hopper kernels, which add up dq in float32 in an order that changes from call
    to call, so the rounding errors of dq also change. Under
    `torch.use_deterministic_algorithms(True)` the order is fixed; if head_dim is above 128, or
    there are too few heads and keys for this, backward uses the Triton kernels, which are
    deterministic, too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        scale: float | None = None,
        return_lse: bool = False,
        variant: Variant = NO_VARIANT,
        packing: Packing | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        options = is_causal, scale, "fp16x3", "hopper"
        return _forward(ctx, q, k, v, options, variant, packing, return_lse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*_backward(ctx, *grads), *[None] * 5)


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
    options: tuple[bool, float | None, str, str],
    variant: Variant,
    packing: Packing | None,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run the forward pass, and save what backward needs.

    The options are is_causal, scale, precision and kernels, as in `kernel_choice.forward`.
    """
    ctx.dtypes = q.dtype, k.dtype, v.dtype
    q, k, v = autocast(q, k, v)
    if _needs_custom_op():
        from systems.kernels.flash_attention.ops import flash_forward_op

        out, lse = flash_forward_op(q, k, v, *options, *variant, *(packing or ()))
    else:
        out, lse = kernel_choice.forward(q, k, v, *options, variant, packing)
    ctx.save_for_backward(q, k, v, out, lse, *(packing[:2] if packing else ()))
    ctx.options, ctx.variant = options, variant
    ctx.longest = packing[2:] if packing else ()
    ctx.set_materialize_grads(False)  # a gradient that is zero is given as None
    return (out, lse) if return_lse else out


def _backward(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    if dout is None and dlse is None:
        return None, None, None
    tensors = ctx.saved_tensors  # with checkpointing, they can be read only once
    (q, k, v, out, lse), starts = tensors[:5], tensors[5:]
    dout = torch.zeros_like(out) if dout is None else dout
    packing = Packing(*starts, *ctx.longest) if starts else None
    needs_dq, needs_dk, needs_dv = ctx.needs_input_grad[:3]
    is_causal, scale, precision, kernels = ctx.options
    gradients: tuple[Tensor | None, ...]
    if _needs_custom_op():
        from systems.kernels.flash_attention.ops import flash_backward_op

        gradients = flash_backward_op(
            q, k, v, out, lse, dout, is_causal, scale, precision, kernels, needs_dq,
            needs_dk or needs_dv, *ctx.variant, *(packing or (None, None, 0, 0)), dlse,
        )  # fmt: skip
    else:
        gradients = kernel_choice.backward(
            q, k, v, out, lse, dout, is_causal, scale, precision, kernels, needs_dq,
            needs_dk or needs_dv, ctx.variant, packing, dlse,
        )  # fmt: skip
    return tuple(
        gradient.to(dtype) if needed and gradient is not None else None
        for gradient, dtype, needed in zip(
            gradients, ctx.dtypes, (needs_dq, needs_dk, needs_dv), strict=True
        )
    )


def _needs_custom_op() -> bool:
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0
