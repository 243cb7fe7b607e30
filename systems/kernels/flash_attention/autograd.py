"""torch.autograd.Function classes and custom operators of the Triton and the Hopper kernels.

torch.compile does not trace into a custom operator. A torch dispatch mode, such as a FLOP counter
or selective activation checkpointing, sees the custom operator as one call and can save its
results. Otherwise, the kernels are launched directly, which saves about 20 microseconds of host
time per pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library
from torch.autograd.function import once_differentiable

from systems.kernels.flash_attention.call import PLAIN, Call, Packing, autocast, is_traced
from systems.kernels.flash_attention.hopper import backward_launch, forward_launch
from systems.kernels.flash_attention.hopper.forward_launch import HopperForwardPlan
from systems.kernels.flash_attention.triton import launch
from systems.kernels.flash_attention.triton.layout import output_strides

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


class FlashAttentionTriton(torch.autograd.Function):
    """FlashAttention-2 with the Triton kernels, differentiable with respect to q, k and v.

        out = FlashAttentionTriton.apply(q, k, v, is_causal)
        out, lse = FlashAttentionTriton.apply(q, k, v, Call(is_causal, softcap=30, return_lse=True))

    The fourth argument is optional: whether attention is causal, or a `Call`. For the tensors, see
    `triton.launch.flash_forward`. With return_lse, the log-sum-exp of the scores is also returned,
    float32 (..., n_queries), and it is differentiable.

    Forward saves q, k, v, the output and the log-sum-exp for backward, so the saved memory is
    linear in the sequence lengths. Equal inputs give bitwise equal outputs and gradients. Under
    autocast, q, k and v are cast to the autocast dtype, as in torch's scaled_dot_product_attention.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call | bool = PLAIN) -> Any:
        return _forward(ctx, q, k, v, call, False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *grads)


class FlashAttentionHopper(torch.autograd.Function):
    """FlashAttention-3 with the Hopper kernels, differentiable with respect to q, k and v.

        out = FlashAttentionHopper.apply(q, k, v, is_causal)
        out, lse = FlashAttentionHopper.apply(q, k, v, Call(is_causal, softcap=30, return_lse=True))

    The arguments and the outputs are those of `FlashAttentionTriton`. The class needs an H100 or
    H200, bfloat16 or float16 inputs, and as head_dim a multiple of 8 from 64 to 256. That of v must
    be the same, or 128 if that of q and k is above 128. With packed sequences, head_dim must be 64,
    128, 192 or 256. A softcap must be at most 512.

    Backward uses the Triton kernels if q does not need a gradient or neither k nor v needs one.
    Otherwise, it uses Hopper kernels, which add up gradients in float32 in an order that changes
    from call to call, so their rounding errors also change. Under
    `torch.use_deterministic_algorithms(True)` the order is fixed; if head_dim is above 128, or
    there are too few heads and keys for this, backward uses the Triton kernels, which are
    deterministic, too.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call | bool = PLAIN) -> Any:
        return _forward(ctx, q, k, v, call, True)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *grads)


def _forward(
    ctx: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call | bool | HopperForwardPlan,
    on_hopper: bool,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run the forward pass, and save what backward needs.

    A plan is that of `forward_launch.plan_of` for these tensors, which need no cast.
    """
    plan = None
    ctx.dtypes, ctx.plans = (q.dtype, k.dtype, v.dtype), None
    if isinstance(call, HopperForwardPlan):
        plan, call = call, call.call
        ctx.plans = plan.backward_plans
    else:
        if not isinstance(call, Call):
            if not isinstance(call, bool):
                raise ValueError(f"is_causal must be True, False or a Call, got {call!r}")
            call = Call(call)
        q, k, v = autocast(q, k, v)
    packing = call.packing if isinstance(call.packing, Packing) else ()
    if plan is not None:
        out, lse = plan(q, k, v)
    elif is_traced():
        out, lse = flash_forward_op(q, k, v, on_hopper, *operator_arguments(call))
    else:
        out, lse = _run_forward(q, k, v, call, on_hopper)
    ctx.save_for_backward(q, k, v, out, lse, *packing[:2])
    ctx.call, ctx.on_hopper = call._replace(packing=None) if packing else call, on_hopper
    ctx.longest = packing[2:]
    ctx.set_materialize_grads(False)  # a gradient that is zero is given as None
    return (out, lse) if call.return_lse else out


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of the arguments of `_forward`, and refuse second derivatives.

    `once_differentiable` also refuses them, but takes host time in every call.
    """
    differentiate = _refusing_derivatives if torch.is_grad_enabled() else _differentiate
    return differentiate(ctx, *grads)


def _differentiate(
    ctx: Any, dout: Tensor | None, dlse: Tensor | None = None
) -> tuple[Tensor | None, ...]:
    if dout is None and dlse is None:
        return None, None, None, None
    tensors = ctx.saved_tensors  # with checkpointing, they can be read only once
    (q, k, v, out, lse), starts = tensors[:5], tensors[5:]
    dout = torch.zeros_like(out) if dout is None else dout
    needs_dq, needs_dk, needs_dv = ctx.needs_input_grad[:3]
    needs = needs_dq, needs_dk or needs_dv
    call = ctx.call
    if starts:
        call = call._replace(packing=Packing(*starts, *ctx.longest))
    inputs = q, k, v, out, lse, dout, dlse, ctx.on_hopper, *needs
    gradients: Gradients
    if is_traced():
        gradients = flash_backward_op(*inputs, *operator_arguments(call))
    else:
        gradients = _run_backward(*inputs, call, ctx.plans)
    if needs_dq and needs_dk and needs_dv and ctx.dtypes == (q.dtype,) * 3:
        return *gradients, None
    dq, dk, dv = (
        gradient.to(dtype) if needed and gradient is not None else None
        for gradient, dtype, needed in zip(
            gradients, ctx.dtypes, (needs_dq, needs_dk, needs_dv), strict=True
        )
    )
    return dq, dk, dv, None


_refusing_derivatives = once_differentiable(_differentiate)


def _run_forward(
    q: Tensor, k: Tensor, v: Tensor, call: Call, on_hopper: bool, reuse_counters: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the output and its log-sum-exp."""
    if on_hopper:
        return forward_launch.flash_forward(q, k, v, call, reuse_counters=reuse_counters)
    return launch.flash_forward(q, k, v, call)


def _run_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    on_hopper: bool,
    needs_dq: bool,
    needs_dkdv: bool,
    call: Call,
    plans: Any = None,
) -> Gradients:
    """Return dq, dk and dv; None for gradients that are not needed.

    The Hopper kernels always compute all gradients. If only some are needed, the Triton kernels do
    less work. For all gradients of 16 causal heads of 16k tokens on an H200, the Hopper kernels
    take 2.3 ms instead of 3.7 ms with head_dim 64, and 4.2 ms instead of 6.5 ms with 128 (records).
    """
    if on_hopper and needs_dq and needs_dkdv:
        deterministic = torch.are_deterministic_algorithms_enabled()
        if not deterministic or backward_launch.can_be_deterministic(k):
            return backward_launch.flash_backward(
                q, k, v, out, lse, dout, call, dlse=dlse, deterministic=deterministic, plans=plans
            )
    return launch.flash_backward(
        q, k, v, out, lse, dout, call, dlse=dlse, needs_dq=needs_dq, needs_dkdv=needs_dkdv
    )


# An operator has no arguments of other types, so the fields of a call are separate arguments, with
# those of its packing, in the order of `operator_arguments`. torch.compile would compile again for
# each value of an int that is not a SymInt.
_CALL = (
    "bool is_causal, float? scale, SymInt? window_left, SymInt? window_right, bool lower_right, "
    "float? softcap, str precision, Tensor? starts_q, Tensor? starts_k, SymInt max_queries, "
    "SymInt max_keys"
)
_QKV = "Tensor q, Tensor k, Tensor v"


def operator_arguments(call: Call) -> tuple[Any, ...]:
    """Return the last arguments of the operators for a call."""
    packing = call.packing if isinstance(call.packing, Packing) else (None, None, 0, 0)
    return *call[:6], call.precision, *packing


def _call(*arguments: Any) -> Call:
    """Return the call with these `operator_arguments`."""
    is_causal, scale, left, right, lower_right, softcap, precision, *packed = arguments
    packing = None if packed[0] is None else Packing(*packed)
    return Call(is_causal, scale, left, right, lower_right, softcap, packing, precision=precision)


@library.custom_op(
    "cluster_sweeps::flash_forward",
    mutates_args=(),
    schema=f"({_QKV}, bool on_hopper, {_CALL}) -> (Tensor, Tensor)",
)
def flash_forward_op(
    q: Tensor, k: Tensor, v: Tensor, on_hopper: bool, *call: Any
) -> tuple[Tensor, Tensor]:
    """Compute the attention output and its log-sum-exp, as a custom torch operator."""
    return _run_forward(q, k, v, _call(*call), on_hopper, reuse_counters=False)


@flash_forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty_strided(
        (*q.shape[:-1], v.shape[-1]), output_strides(q.shape, q.stride(), v.shape[-1])
    )
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


@library.custom_op(
    "cluster_sweeps::flash_backward",
    mutates_args=(),
    schema=f"({_QKV}, Tensor out, Tensor lse, Tensor dout, Tensor? dlse, bool on_hopper, "
    f"bool needs_dq, bool needs_dkdv, {_CALL}) -> (Tensor, Tensor, Tensor)",
)
def flash_backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    on_hopper: bool,
    needs_dq: bool,
    needs_dkdv: bool,
    *call: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dq, dk and dv as a custom operator, which cannot return None: empty if not needed."""
    gradients = _run_backward(
        q, k, v, out, lse, dout, dlse, on_hopper, needs_dq, needs_dkdv, _call(*call)
    )
    dq, dk, dv = (q.new_empty(0) if gradient is None else gradient for gradient in gradients)
    return dq, dk, dv


@flash_backward_op.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None,
    on_hopper: bool, needs_dq: bool, needs_dkdv: bool, *call: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    needed = zip((q, k, v), (needs_dq, needs_dkdv, needs_dkdv), strict=True)
    dq, dk, dv = (_like(x) if is_needed else q.new_empty(0) for x, is_needed in needed)
    return dq, dk, dv


def _like(x: Tensor) -> Tensor:
    return x.new_empty_strided(x.shape, output_strides(x.shape, x.stride()))
