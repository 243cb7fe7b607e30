"""Dispatch forward and backward to the kernels named "triton" or "hopper"."""

from __future__ import annotations

import torch
from torch import Tensor

from systems.kernels.flash_attention.hopper import backward_launch, forward_launch
from systems.kernels.flash_attention.triton import launch


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float | None,
    precision: str,
    kernels: str,
    reuse_counters: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return (out, lse) as `triton.launch.flash_forward` does.

    Args:
        kernels: "triton" or "hopper".
        reuse_counters: see `forward_launch.flash_forward`; only the Hopper kernels use it.
    """
    if kernels == "hopper":
        return forward_launch.flash_forward(
            q, k, v, is_causal, scale, reuse_counters=reuse_counters
        )
    return launch.flash_forward(q, k, v, is_causal, scale, precision=precision)


def backward(
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
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return (dq, dk, dv) as `triton.launch.flash_backward` does, None for those not needed.

    kernels="hopper" falls back to the Triton kernels if deterministic algorithms are required or if
    not all gradients are needed.
    """
    on_hopper = kernels == "hopper" and not torch.are_deterministic_algorithms_enabled()
    if on_hopper and backward_launch.unsupported_reason(q, needs_dq, needs_dkdv) is None:
        return backward_launch.flash_backward(q, k, v, out, lse, dout, is_causal, scale)
    return launch.flash_backward(
        q, k, v, out, lse, dout, is_causal, scale, precision=precision, needs_dq=needs_dq,
        needs_dkdv=needs_dkdv,
    )  # fmt: skip
