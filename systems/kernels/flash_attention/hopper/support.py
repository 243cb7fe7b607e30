"""Which inputs the Hopper kernels support."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from systems.kernels.device import is_hopper
from systems.kernels.flash_attention.hopper.tiles import (
    HEAD_DIMS,
    NARROW_VALUE_DIM,
    PACKED_HEAD_DIMS,
)
from systems.kernels.flash_attention.triton.base_plan import MAX_SIMPLE_SOFTCAP, softcap_form
from systems.kernels.flash_attention.validation import MAX_PLANS
from systems.kernels.flash_attention.variant import NO_VARIANT, Variant

HOPPER_DTYPES = (torch.bfloat16, torch.float16)


def unsupported_reason(
    q: Tensor,
    variant: Variant = NO_VARIANT,
    is_packed: bool = False,
    value_dim: int | None = None,
) -> str | None:
    """Return the reason why the Hopper kernels do not support q, or None if they support q.

    `variant` and `is_packed`: see `registry.unsupported_reason`. The head dimension of v is that of
    q by default.
    """
    call = q.device, q.dtype, q.shape[-1], variant.softcap, is_packed, value_dim
    if torch.compiler.is_compiling():  # torch.compile warns of lru_cache
        return _unsupported_reason(*call)
    return _cached_reason(*call)


def _unsupported_reason(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    softcap: float | None,
    is_packed: bool,
    value_dim: int | None = None,
) -> str | None:
    if not is_hopper(device):
        return "flash_hopper needs a Hopper GPU (compute capability 9.0)"
    if softcap is not None and softcap_form(softcap) != 1:
        return f"flash_hopper needs a softcap of at most {MAX_SIMPLE_SOFTCAP}, got {softcap}"
    if is_packed and head_dim not in PACKED_HEAD_DIMS:
        return (
            f"flash_hopper needs head_dim {_listed(PACKED_HEAD_DIMS)} for packed sequences, "
            f"got {head_dim}"
        )
    if value_dim not in (None, head_dim) and (value_dim != NARROW_VALUE_DIM or head_dim <= 128):
        return (
            f"flash_hopper needs v to have the head_dim of q, or {NARROW_VALUE_DIM} if that of q "
            f"is above 128, got {value_dim} for v and {head_dim} for q"
        )
    return hopper_form_reason(dtype, head_dim)


def hopper_form_reason(dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why the Hopper kernels do not support a dtype or head dimension, or None."""
    if dtype in HOPPER_DTYPES and head_dim in HEAD_DIMS:
        return None
    return (
        f"flash_hopper needs dtype {_listed(HOPPER_DTYPES)} and as head_dim a multiple of 8 from "
        f"{HEAD_DIMS[0]} to {HEAD_DIMS[-1]}, got {dtype} and head_dim {head_dim}"
    )


def _listed(values: Sequence[object]) -> str:
    """Return the values as text, such as "64, 128 or 256"."""
    return " or ".join([", ".join(map(str, values[:-1])), str(values[-1])])


_cached_reason = functools.lru_cache(maxsize=MAX_PLANS)(_unsupported_reason)
