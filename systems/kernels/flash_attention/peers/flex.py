"""Attention with torch's FlexAttention, for which torch.compile generates a Triton kernel.

Functions import torch's module when they are called, because it imports torch's compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from systems.kernels.flash_attention.call import GROUPED, VALUE_DIM, Call, Implementation

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def flex(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    """Compute attention with torch's `flex_attention`, compiled by torch.compile.

    torch compiles a kernel for each new shape. Past torch._dynamo.config.recompile_limit shapes (8
    by default), it warns and uses the uncompiled function, which materializes the score matrix. q
    is (batch, heads, seq_len, head_dim). k and v may have fewer heads, as for `naive`.

    Raises:
        RuntimeError: if torch has no kernel for these inputs.
    """
    mask = _causal_mask(q.shape[-2], k.shape[-2], q.device) if call.is_causal else None
    enable_gqa = bool(q.shape[-3] != k.shape[-3])
    out = _compiled()(q, k, v, block_mask=mask, scale=call.scale, enable_gqa=enable_gqa)
    assert isinstance(out, Tensor)
    return out


@functools.cache
def _compiled() -> Callable[..., object]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@functools.lru_cache(maxsize=64)
def _causal_mask(n_queries: int, n_keys: int, device: torch.device) -> BlockMask:
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    # The mask is cached. If it were created in inference mode, autograd could not use it later.
    with torch.inference_mode(False):
        return create_block_mask(sees, None, None, n_queries, n_keys, device=str(device))


def _unsupported_reason(q: Tensor, k: Tensor, v: Tensor, call: Call) -> str | None:
    """Return the reason why FlexAttention does not support a call, or None if it does."""
    if not q.is_cuda:
        return "flex needs a CUDA GPU"
    return _form_reason(q.dtype, q.shape[-1], v.shape[-1])


def _form_reason(dtype: torch.dtype, head_dim: int, value_dim: int) -> str | None:
    """Return why FlexAttention does not support a head dimension, or None if it does."""
    if head_dim >= 16 and not head_dim & (head_dim - 1):
        return None
    return f"flex needs a head_dim that is a power of two and at least 16, got {head_dim}"


IMPLEMENTATIONS = {
    "flex": Implementation(
        flex, frozenset({GROUPED, VALUE_DIM}), _unsupported_reason, _form_reason, "CUDA GPU"
    )
}
