"""Attention by name, so that a model, a sweep and a table mean the same by it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from systems.kernels.device import runs_kernels
from systems.kernels.flash_attention.autograd import FlashAttentionHopper, FlashAttentionTriton
from systems.kernels.flash_attention.configurations import DTYPES, MAX_HEAD_DIM
from systems.kernels.flash_attention.hopper import forward_launch
from systems.kernels.flash_attention.naive import naive
from systems.kernels.flash_attention.sdpa import SDPA_BACKENDS, sdpa, why_not_sdpa
from systems.kernels.flash_attention.tiled import FlashAttentionPyTorch


def flex(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """`flex.flex`, imported when it is called: it brings torch's compiler."""
    from systems.kernels.flash_attention.flex import flex

    return flex(q, k, v, is_causal, scale)


def flash_pytorch(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """`FlashAttentionPyTorch.apply`, its arguments by name."""
    return FlashAttentionPyTorch.apply(q, k, v, is_causal, scale)


def flash_triton(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """`FlashAttentionTriton.apply`, its arguments by name."""
    return FlashAttentionTriton.apply(q, k, v, is_causal, scale)


def flash_hopper(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """`FlashAttentionHopper.apply`, its arguments by name."""
    return FlashAttentionHopper.apply(q, k, v, is_causal, scale)


# (q, k, v, is_causal=..., scale=...) -> out; q, k, v (batch, heads, seq_len, head_dim).
# `api.flash_attention` takes other leading dimensions too, and checks what it is given.
ATTENTIONS: dict[str, Callable[..., Tensor]] = {
    "naive": naive,
    "flash_pytorch": flash_pytorch,
    "flash_triton": flash_triton,
    "flash_hopper": flash_hopper,
    "sdpa": scaled_dot_product_attention,  # the backend that torch chooses
    "flex": flex,
    **{name: partial(sdpa, implementation=name) for name in SDPA_BACKENDS},
}


def why_not(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, implementation: str) -> str | None:
    """Why an implementation of ATTENTIONS does not take these inputs here, or None if it does."""
    if implementation in SDPA_BACKENDS:
        return why_not_sdpa(q, k, v, is_causal, implementation)
    if implementation == "flex":
        from systems.kernels.flash_attention.flex import why_not_flex

        return why_not_flex(q)
    if implementation == "flash_hopper":
        return forward_launch.why_not(q)
    return _why_not_triton(q) if implementation == "flash_triton" else None


def _why_not_triton(q: Tensor) -> str | None:
    if not runs_kernels(q.device):
        return "flash_triton needs a CUDA GPU"
    if q.dtype not in DTYPES or q.shape[-1] > MAX_HEAD_DIM:
        return (
            f"flash_triton takes {', '.join(map(str, DTYPES))} and head_dim up to {MAX_HEAD_DIM}, "
            f"not {q.dtype} and {q.shape[-1]}"
        )
    return None
