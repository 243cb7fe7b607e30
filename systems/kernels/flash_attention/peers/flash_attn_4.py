"""Attention with the kernels of the package flash-attn-4, if it is installed.

They are measured beside the kernels of this project, on Hopper and Blackwell GPUs.
"""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from systems.kernels.alignment import aligned, aligning_gradient
from systems.kernels.flash_attention.call import FEATURES, LSE, Call, Implementation, Packing

DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256


def flash_attn_4(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """Compute attention with `flash_attn.cute`.

    Tensors are (batch, heads, rows, head_dim), or with packing (heads, rows, head_dim). Its own are
    (batch, rows, heads, head_dim), so this function passes transposed views and returns one. Its
    masks are aligned to the lower right corner.
    """
    _keep_compiled_kernels()
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    mask, packing = call.mask, call.packing
    options: dict[str, Any] = {
        "softmax_scale": call.scale, "causal": mask.right == 0 and mask.left is None,
        "softcap": call.softcap or 0.0,
    }  # fmt: skip
    if not options["causal"]:
        options["window_size"] = tuple(
            None if bound is None else min(bound, q.shape[-2] + k.shape[-2])
            for bound in (mask.left, mask.right)
        )
    q, k, v = (aligned(x).transpose(-3, -2) for x in (q, k, v))
    if not isinstance(packing, Packing):
        out = flash_attn_func(q, k, v, **options)
    else:
        out = flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=packing.starts_q, cu_seqlens_k=packing.starts_k,
            max_seqlen_q=packing.max_queries, max_seqlen_k=packing.max_keys, **options,
        )  # fmt: skip
    out = out[0] if isinstance(out, tuple) else out
    return aligning_gradient(out).transpose(-3, -2)


def _unsupported_reason(q: Tensor, k: Tensor, v: Tensor, call: Call) -> str | None:
    """Return the reason why flash_attn_4 does not support a call, or None if it does."""
    if not q.is_cuda or torch.cuda.get_device_capability(q.device) < (9, 0):
        return "flash_attn_4 needs a Hopper or Blackwell GPU"
    if not _is_installed():
        return "flash_attn_4 needs the package flash-attn-4, which is not installed"
    mask = call.mask
    has_bounds = mask.left is not None or mask.right is not None
    shifts = call.packing is not None or q.shape[-2] != k.shape[-2]
    if has_bounds and not mask.lower_right and shifts:
        return "flash_attn_4 has no upper-left alignment"
    return _form_reason(q.dtype, q.shape[-1], v.shape[-1])


def _form_reason(dtype: torch.dtype, head_dim: int, value_dim: int) -> str | None:
    """Return why flash_attn_4 does not support a dtype or head dimensions, or None if it does."""
    for dim in (head_dim, value_dim):
        if dtype not in DTYPES or dim > MAX_HEAD_DIM or dim % 8 != 0:
            return (
                f"flash_attn_4 needs dtype {' or '.join(map(str, DTYPES))} and a head_dim up to "
                f"{MAX_HEAD_DIM} that is a multiple of 8, got {dtype} and head_dim {dim}"
            )
    return None


@cache
def _keep_compiled_kernels() -> None:
    """Make the package keep its compiled kernels for later processes; compiling takes seconds.

    Call this before the package is imported. Its default folder is in /tmp, where others could put
    code; here it is ~/.cache/cluster-sweeps. Environment variables that are set have priority.
    """
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # the user of a container may have no home folder
        return
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    os.environ.setdefault(
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(caches / "cluster-sweeps/flash_attn_4")
    )


@cache
def _is_installed() -> bool:
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:
        return False


IMPLEMENTATIONS = {
    "flash_attn_4": Implementation(
        flash_attn_4, frozenset(FEATURES) - {LSE}, _unsupported_reason, _form_reason,
        "Hopper, Blackwell",
    )
}  # fmt: skip
