"""Forward and backward passes of attention, with either the Triton or the Hopper kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from systems.kernels.device import multiprocessors
from systems.kernels.flash_attention.hopper import backward_launch, forward_launch
from systems.kernels.flash_attention.hopper.splits import fills_gpu
from systems.kernels.flash_attention.triton import launch
from systems.kernels.flash_attention.variant import NO_VARIANT, Packing, Variant


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float | None,
    precision: str,
    kernels: str,
    variant: Variant = NO_VARIANT,
    packing: Packing | None = None,
    reuse_counters: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute the attention output and its log-sum-exp with the Triton or the Hopper kernels.

    The arguments and results are those of `triton.launch.flash_forward`, and reuse_counters is that
    of `hopper.forward_launch.flash_forward`; `kernels` is "triton" or "hopper". The Hopper kernels
    need inputs for which `hopper.support.unsupported_reason` is None, and ignore the precision.
    """
    if kernels == "hopper":
        return forward_launch.flash_forward(
            q, k, v, is_causal, scale, variant=variant, packing=packing,
            reuse_counters=reuse_counters,
        )  # fmt: skip
    return launch.flash_forward(
        q, k, v, is_causal, scale, variant=variant, packing=packing, precision=precision
    )


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
    variant: Variant = NO_VARIANT,
    packing: Packing | None = None,
    dlse: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of attention with respect to q, k and v, with Triton or Hopper kernels.

    With kernels="hopper", the Triton kernels are still used if not all gradients are needed, and if
    the Hopper kernels do not support q. If torch requires deterministic algorithms, the Triton
    kernels are also used if head_dim is above 128, and if there are fewer blocks of keys than
    multiprocessors: the Hopper kernels would have to split the queries, which they cannot do in a
    fixed order. The other arguments and the results are those of `triton.launch.flash_backward`.
    """
    call = variant, packing is not None, v.shape[-1]
    deterministic = torch.are_deterministic_algorithms_enabled()
    on_hopper = kernels == "hopper"
    if on_hopper and deterministic:
        on_hopper = q.shape[-1] <= backward_launch.MAX_DETERMINISTIC_HEAD_DIM and fills_gpu(
            k.shape, multiprocessors(k.device.index)
        )
    if on_hopper and backward_launch.unsupported_reason(q, needs_dq, needs_dkdv, *call) is None:
        return backward_launch.flash_backward(
            q, k, v, out, lse, dout, is_causal, scale, variant=variant, packing=packing, dlse=dlse,
            deterministic=deterministic,
        )  # fmt: skip
    return launch.flash_backward(
        q, k, v, out, lse, dout, is_causal, scale, variant=variant, packing=packing,
        precision=precision, needs_dq=needs_dq, needs_dkdv=needs_dkdv, dlse=dlse,
    )  # fmt: skip
