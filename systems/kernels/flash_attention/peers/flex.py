"""Attention with torch's FlexAttention, for which torch.compile generates a Triton kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


def flex(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """Compute attention with torch's `flex_attention`, compiled by torch.compile.

    torch compiles a kernel for each new shape. The number of compiled shapes is limited by
    torch._dynamo.config.recompile_limit (8 by default). Past this limit, torch warns and uses the
    uncompiled function, which materializes the score matrix. q is (batch, heads, seq_len,
    head_dim). k and v may have fewer heads, as for `naive`.

    Raises:
        RuntimeError: if torch has no kernel for these inputs.
    """
    mask = _causal_mask(q.shape[-2], k.shape[-2], q.device) if is_causal else None
    enable_gqa = bool(q.shape[-3] != k.shape[-3])
    out = _compiled()(q, k, v, block_mask=mask, scale=scale, enable_gqa=enable_gqa)
    assert isinstance(out, Tensor)
    return out


@functools.cache
def _compiled() -> Callable[..., object]:
    return torch.compile(flex_attention, dynamic=False)


@functools.lru_cache(maxsize=64)
def _causal_mask(n_queries: int, n_keys: int, device: torch.device) -> BlockMask:
    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    # The mask is cached. If it were created in inference mode, autograd could not use it later.
    with torch.inference_mode(False):
        return create_block_mask(sees, None, None, n_queries, n_keys, device=str(device))


def flex_unsupported_reason(q: Tensor) -> str | None:
    """Return the reason why FlexAttention does not support q, or None if it supports q."""
    if not q.is_cuda:
        return "flex needs a CUDA GPU"
    return flex_form_reason(q.shape[-1])


def flex_form_reason(head_dim: int) -> str | None:
    """Return why FlexAttention does not support a head dimension, or None if it does."""
    if head_dim >= 16 and not head_dim & (head_dim - 1):
        return None
    return f"flex needs a head_dim that is a power of two and at least 16, got {head_dim}"
