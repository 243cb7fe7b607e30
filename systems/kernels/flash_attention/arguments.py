"""Checks of the arguments of `flash_attention` and `flash_attention_packed`."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection
from numbers import Real

import torch
from torch import Tensor

from systems.kernels.flash_attention.triton.tile_table import KERNEL_DTYPES
from systems.kernels.flash_attention.validation import qkv_errors
from systems.kernels.flash_attention.variant import Packing

DTYPES = (*KERNEL_DTYPES, torch.float64)
ALIGNMENTS = ("upper_left", "lower_right")
LAYOUTS = ("bhsd", "bshd")


def tensor_errors(q: Tensor, k: Tensor, v: Tensor) -> list[str]:
    """Return a list of error messages for invalid shapes, dtypes or devices of q, k and v.

    Args:
        q, k, v: (..., heads, rows, head_dim).
    """
    return qkv_errors(
        (q.shape, k.shape, v.shape),
        (q.dtype, k.dtype, v.dtype),
        (q.device, k.device, v.device),
        DTYPES,
    )


def option_errors(
    is_causal: object,
    scale: object,
    implementation: object,
    implementations: Collection[str],
    window: object,
    alignment: object,
    softcap: object,
    layout: object,
) -> list[str]:
    """Return a list of error messages for invalid options of `flash_attention`.

    Args:
        implementations: valid names of implementations, without "auto".
    """
    errors = []
    valid = ["auto", *implementations]
    if implementation not in valid:
        close = difflib.get_close_matches(str(implementation), valid, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        errors.append(
            f"implementation must be one of {', '.join(valid)}, got {implementation!r}{hint}"
        )
    if not isinstance(is_causal, bool):
        errors.append(
            "is_causal must be True or False (other masks are not supported), got "
            f"{_describe(is_causal)}"
        )
    if scale is not None and (not isinstance(scale, Real) or not math.isfinite(scale)):
        errors.append(
            "scale must be a finite number, not a tensor (scale gets no gradient), got "
            f"{_describe(scale)}"
        )
    bounds = window if isinstance(window, tuple) else ()
    if len(bounds) != 2 or not all(bound is None or _is_natural(bound) for bound in bounds):
        errors.append(
            "window must be (left, right), each a number of keys from 0 on or None for no limit, "
            f"got {_describe(window)}"
        )
    if softcap is not None and not (isinstance(softcap, Real) and 0 < float(softcap) < math.inf):
        errors.append(f"softcap must be a number above 0, or None, got {_describe(softcap)}")
    for name, given, names in (("alignment", alignment, ALIGNMENTS), ("layout", layout, LAYOUTS)):
        if given not in names:
            errors.append(f"{name} must be one of {', '.join(names)}, got {given!r}")
    return errors


def packing_errors(
    device: torch.device,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> list[str]:
    """Return a list of error messages for invalid boundaries of packed sequences.

    The values of the boundaries are not checked here (see `make_packing`).
    """
    errors = []
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(starts, Tensor):
            errors.append(f"{name} must be a tensor, got {_describe(starts)}")
        elif starts.dim() != 1 or len(starts) < 2 or starts.dtype != torch.int32:
            errors.append(
                f"{name} must be an int32 tensor of n_sequences + 1 numbers, got {starts.dtype} "
                f"of shape {tuple(starts.shape)}"
            )
        elif starts.device != device:
            errors.append(f"{name} must be on the device of q, {device}, got {starts.device}")
    if not errors and len(cu_seqlens_q) != len(cu_seqlens_k):
        errors.append(
            "cu_seqlens_q and cu_seqlens_k must have the same number of sequences, got "
            f"{len(cu_seqlens_q) - 1} and {len(cu_seqlens_k) - 1}"
        )
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if longest is not None and not _is_natural(longest):
            errors.append(f"{name} must be a number from 0 on, or None, got {_describe(longest)}")
    return errors


def make_packing(
    rows_q: int,
    rows_k: int,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> Packing:
    """Return the packed sequences, with the lengths of the longest ones.

    If a length is not given, it is computed, and the boundaries of its side are checked. This
    copies them from the GPU.

    Args:
        rows_q, rows_k: number of rows of q and of k.
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as given to
            `flash_attention_packed`.

    Raises:
        ValueError: if the boundaries do not go from 0 to the number of rows, or decrease.
    """
    if max_seqlen_q is None:
        max_seqlen_q = _longest("cu_seqlens_q", cu_seqlens_q, rows_q)
    if max_seqlen_k is None:
        max_seqlen_k = _longest("cu_seqlens_k", cu_seqlens_k, rows_k)
    # Kernels read the boundaries with a stride of 1.
    return Packing(cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(), max_seqlen_q, max_seqlen_k)


def _longest(name: str, starts: Tensor, n_rows: int) -> int:
    boundaries = starts.cpu()
    lengths = boundaries.diff()
    if boundaries[0] != 0 or boundaries[-1] != n_rows or (lengths < 0).any():
        raise ValueError(
            f"{name} must go from 0 to the number of rows, {n_rows}, without decreasing, got "
            f"{boundaries.tolist() if len(boundaries) < 20 else boundaries}"
        )
    return int(lengths.max())


def _is_natural(x: object) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


def _describe(x: object) -> str:
    return f"a tensor of shape {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x)
