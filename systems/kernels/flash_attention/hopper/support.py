"""Which inputs the Hopper kernels support."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from systems.kernels.device import is_hopper
from systems.kernels.flash_attention.call import Call
from systems.kernels.flash_attention.hopper.tiles import (
    HEAD_DIMS,
    NARROW_VALUE_DIM,
    PACKED_HEAD_DIMS,
)
from systems.kernels.flash_attention.triton.base_plan import MAX_SIMPLE_SOFTCAP, softcap_form

HOPPER_DTYPES = (torch.bfloat16, torch.float16)


def unsupported_reason(q: Tensor, k: Tensor, v: Tensor, call: Call) -> str | None:
    """Return the reason why the Hopper kernels do not support a call, or None if they do."""
    return reason_for(q.device, q.dtype, q.shape[-1], v.shape[-1], call)


def reason_for(
    device: torch.device, dtype: torch.dtype, head_dim: int, value_dim: int, call: Call
) -> str | None:
    """Return what `unsupported_reason` returns for such tensors."""
    if not is_hopper(device):
        return "flash_hopper needs a Hopper GPU (compute capability 9.0)"
    if call.softcap is not None and softcap_form(call.softcap) != 1:
        return f"flash_hopper needs a softcap of at most {MAX_SIMPLE_SOFTCAP}, got {call.softcap}"
    if call.packing is not None and head_dim not in PACKED_HEAD_DIMS:
        return (
            f"flash_hopper needs head_dim {_listed(PACKED_HEAD_DIMS)} for packed sequences, "
            f"got {head_dim}"
        )
    return form_reason(dtype, head_dim, value_dim)


def form_reason(dtype: torch.dtype, head_dim: int, value_dim: int) -> str | None:
    """Return why the Hopper kernels do not support a dtype or head dimensions, or None."""
    if dtype not in HOPPER_DTYPES or head_dim not in HEAD_DIMS:
        return (
            f"flash_hopper needs dtype {_listed(HOPPER_DTYPES)} and as head_dim a multiple of 8 "
            f"from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}, got {dtype} and head_dim {head_dim}"
        )
    if value_dim != head_dim and (value_dim != NARROW_VALUE_DIM or head_dim <= 128):
        return (
            f"flash_hopper needs v to have the head_dim of q, or {NARROW_VALUE_DIM} if that of q "
            f"is above 128, got {value_dim} for v and {head_dim} for q"
        )
    return None


def _listed(values: Sequence[object]) -> str:
    """Return the values as text, such as "64, 128 or 256"."""
    return " or ".join([", ".join(map(str, values[:-1])), str(values[-1])])
