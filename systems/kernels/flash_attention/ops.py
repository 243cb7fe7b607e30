"""Custom torch operators for the forward and backward passes of attention, without autograd.

torch.compile does not trace into a custom operator. A torch dispatch mode, such as a FLOP counter
or selective activation checkpointing, sees the custom operator as one call and can save its
results.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, library

from systems.kernels.flash_attention import kernel_choice
from systems.kernels.flash_attention.layout import output_strides
from systems.kernels.flash_attention.variant import Packing, Variant


@library.custom_op("cluster_sweeps::flash_forward", mutates_args=())
def flash_forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float | None,
    precision: str,
    kernels: str,
    window_left: int | None = None,
    window_right: int | None = None,
    lower_right: bool = False,
    softcap: float | None = None,
    starts_q: Tensor | None = None,
    starts_k: Tensor | None = None,
    max_queries: int = 0,
    max_keys: int = 0,
) -> tuple[Tensor, Tensor]:
    """Compute the attention output and its log-sum-exp, as a custom torch operator.

    `kernel_choice.forward` describes the arguments and results. The fields of a `Variant` and of a
    `Packing` are separate arguments, because an operator has no arguments of other types.
    """
    variant = Variant(window_left, window_right, lower_right, softcap)
    packing = _packing(starts_q, starts_k, max_queries, max_keys)
    return kernel_choice.forward(
        q, k, v, is_causal, scale, precision, kernels, variant, packing, reuse_counters=False
    )


@flash_forward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty_strided(
        (*q.shape[:-1], v.shape[-1]), output_strides(q.shape, q.stride(), v.shape[-1])
    )
    return out, q.new_empty(q.shape[:-1], dtype=torch.float32)


@library.custom_op("cluster_sweeps::flash_backward", mutates_args=())
def flash_backward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    is_causal: bool,
    scale: float | None,
    precision: str,
    kernels: str,
    needs_dq: bool,
    needs_dkdv: bool,
    window_left: int | None = None,
    window_right: int | None = None,
    lower_right: bool = False,
    softcap: float | None = None,
    starts_q: Tensor | None = None,
    starts_k: Tensor | None = None,
    max_queries: int = 0,
    max_keys: int = 0,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients dq, dk and dv of attention, as a custom torch operator.

    `kernel_choice.backward` describes the arguments. A gradient that is not needed is returned as
    an empty tensor, because a custom operator cannot return None instead of a tensor.
    """
    variant = Variant(window_left, window_right, lower_right, softcap)
    packing = _packing(starts_q, starts_k, max_queries, max_keys)
    gradients = kernel_choice.backward(
        q, k, v, out, lse, dout, is_causal, scale, precision, kernels, needs_dq, needs_dkdv,
        variant, packing, dlse,
    )  # fmt: skip
    dq, dk, dv = (q.new_empty(0) if gradient is None else gradient for gradient in gradients)
    return dq, dk, dv


@flash_backward_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    is_causal: bool,
    scale: float | None,
    precision: str,
    kernels: str,
    needs_dq: bool,
    needs_dkdv: bool,
    *rest: Any,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    dq = _like(q) if needs_dq else q.new_empty(0)
    dk, dv = (_like(k), _like(v)) if needs_dkdv else (q.new_empty(0), q.new_empty(0))
    return dq, dk, dv


def _packing(
    starts_q: Tensor | None, starts_k: Tensor | None, max_queries: int, max_keys: int
) -> Packing | None:
    if starts_q is None or starts_k is None:
        return None
    return Packing(starts_q, starts_k, max_queries, max_keys)


def _like(x: Tensor) -> Tensor:
    return x.new_empty_strided(x.shape, output_strides(x.shape, x.stride()))
