"""Table of the implementations of attention, and the inputs that each implementation supports."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from systems.kernels.device import runs_kernels
from systems.kernels.flash_attention.autograd import FlashAttentionHopper, FlashAttentionTriton
from systems.kernels.flash_attention.flash_pytorch import FlashAttentionPyTorch
from systems.kernels.flash_attention.hopper import forward_launch
from systems.kernels.flash_attention.naive import naive
from systems.kernels.flash_attention.sdpa import SDPA_BACKENDS, sdpa, sdpa_unsupported_reason
from systems.kernels.flash_attention.triton.tile_table import KERNEL_DTYPES, MAX_HEAD_DIM


def flex(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """Compute attention with torch's FlexAttention; see the function `flex` of the module `flex`.

    The module `flex` is imported on the first call instead of at the top of this file, because it
    imports torch's compiler.
    """
    from systems.kernels.flash_attention.flex import flex

    return flex(q, k, v, is_causal, scale)


# `torch.autograd.Function.apply` does not accept keyword arguments; the next three functions do.
def flash_pytorch(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """Compute attention with FlashAttention-2 in plain torch; see `FlashAttentionPyTorch`."""
    return FlashAttentionPyTorch.apply(q, k, v, is_causal, scale)


def flash_triton(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """Compute attention with FlashAttention-2 in Triton; see `FlashAttentionTriton`."""
    return FlashAttentionTriton.apply(q, k, v, is_causal, scale)


def flash_hopper(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """Compute attention with FlashAttention-3 on a Hopper GPU; see `FlashAttentionHopper`."""
    return FlashAttentionHopper.apply(q, k, v, is_causal, scale)


# Functions (q, k, v, is_causal=..., scale=...) -> out of tensors (batch, heads, seq_len, head_dim).
# `api.flash_attention` also checks its inputs and accepts other leading dimensions.
ATTENTIONS: dict[str, Callable[..., Tensor]] = {
    "naive": naive,
    "flash_pytorch": flash_pytorch,
    "flash_triton": flash_triton,
    "flash_hopper": flash_hopper,
    "sdpa": scaled_dot_product_attention,  # the backend that torch chooses
    "flex": flex,
    **{name: partial(sdpa, implementation=name) for name in SDPA_BACKENDS},
}


def unsupported_reason(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, implementation: str
) -> str | None:
    """Return the reason why an implementation does not support these inputs, or None if it does.

    The result also depends on this machine, for example on its GPU.

    Args:
        q, k, v: (batch, heads, seq_len, head_dim).
        is_causal: whether attention has a causal mask.
        implementation: name of the implementation, a key of the table ATTENTIONS.
    """
    if implementation in SDPA_BACKENDS:
        return sdpa_unsupported_reason(q, k, v, is_causal, implementation)
    if implementation == "flex":
        from systems.kernels.flash_attention.flex import flex_unsupported_reason

        return flex_unsupported_reason(q)
    if implementation == "flash_hopper":
        return forward_launch.unsupported_reason(q)
    return _triton_unsupported_reason(q) if implementation == "flash_triton" else None


def _triton_unsupported_reason(q: Tensor) -> str | None:
    if not runs_kernels(q.device):
        return "flash_triton needs a CUDA GPU"
    if q.dtype not in KERNEL_DTYPES or q.shape[-1] > MAX_HEAD_DIM:
        return (
            f"flash_triton needs one of the dtypes {', '.join(map(str, KERNEL_DTYPES))} and a "
            f"head_dim up to {MAX_HEAD_DIM}, got {q.dtype} and head_dim {q.shape[-1]}"
        )
    return None
