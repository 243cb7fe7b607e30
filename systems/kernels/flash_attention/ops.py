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


@library.custom_op("cluster_sweeps::flash_forward", mutates_args=())
def flash_forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float | None,
    precision: str,
    kernels: str,
) -> tuple[Tensor, Tensor]:
    """Compute the attention output and its log-sum-exp, as a custom torch operator.

    `kernel_choice.forward` describes the arguments and results.
    """
    return kernel_choice.forward(
        q, k, v, is_causal, scale, precision, kernels, reuse_counters=False
    )


@flash_forward_op.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


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
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients dq, dk and dv of attention, as a custom torch operator.

    `kernel_choice.backward` describes the arguments. A gradient that is not needed is returned as
    an empty tensor, because a custom operator cannot return None instead of a tensor.
    """
    gradients = kernel_choice.backward(
        q, k, v, out, lse, dout, is_causal, scale, precision, kernels, needs_dq, needs_dkdv
    )
    dq, dk, dv = (q.new_empty(0) if gradient is None else gradient for gradient in gradients)
    return dq, dk, dv


@flash_backward_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    needs_dq, needs_dkdv = rest[-2:]
    dq = _like(q) if needs_dq else q.new_empty(0)
    dk, dv = (_like(k), _like(v)) if needs_dkdv else (q.new_empty(0), q.new_empty(0))
    return dq, dk, dv


def _like(x: Tensor) -> Tensor:
    return x.new_empty_strided(x.shape, output_strides(x.shape, x.stride()))
