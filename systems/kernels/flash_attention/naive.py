"""Attention computed from its definition, with the full score matrix in memory."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from systems.kernels.flash_attention.call import FEATURES, PLAIN, Call, Implementation, Packing


def naive(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """Compute softmax(q k^T * scale) v, with all intermediate results in the inputs' dtype.

    This is equation 1 of "Attention Is All You Need" (Vaswani et al. 2017, section 3.2.1). The
    function needs O(n_queries * n_keys) memory. The result is (..., n_queries, value_dim), of q's
    dtype.

    Args:
        q: (..., n_queries, head_dim).
        k, v: (..., n_keys, head_dim or value_dim), with the leading dimensions and dtype of q. They
            may have fewer heads, if their number divides that of q. Each head of k and v then
            belongs to as many consecutive heads of q.
        is_causal: if True, query i sees only keys 0 to i (aligned to the upper left, as in torch).
        scale: multiplies the scores; 1/sqrt(head_dim) by default.
    """
    if not isinstance(is_causal, bool):  # a Call would count as True
        raise ValueError(f"is_causal must be True or False, got {type(is_causal).__name__}")
    k, v = _with_heads_of(q, k, v)
    return torch.softmax(masked_scores(q, k, Call(is_causal, scale)), dim=-1) @ v


def naive_with_lse(q: Tensor, k: Tensor, v: Tensor, call: Call = PLAIN) -> tuple[Tensor, Tensor]:
    """Compute a variant of attention and the log-sum-exp of the scores, from their definition.

    Unlike `naive`, the function computes float16 and bfloat16 inputs in float32, also under
    autocast: results are merged by their log-sum-exp, which must not have errors of 16 bits. The
    tensors are those of `naive`. Packed ones are (heads, rows of all sequences, head_dim or
    value_dim), and their boundaries are copied from the GPU.

    Returns:
        out: (..., n_queries, value_dim), of q's dtype; zero for a query that sees no key.
        lse: (..., n_queries), float32 (float64 for float64 inputs); -inf for such a query.
    """
    if isinstance(call.packing, Packing):
        queries, keys = (starts.diff().tolist() for starts in call.packing[:2])
        parts = q.split(queries, -2), k.split(keys, -2), v.split(keys, -2)
        one = call._replace(packing=None)
        outs, lses = zip(*(naive_with_lse(*x, one) for x in zip(*parts, strict=True)), strict=True)
        return torch.cat(outs, -2), torch.cat(lses, -1)
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v = (x.to(wide) for x in (q, *_with_heads_of(q, k, v)))
    with _without_autocast(q):
        # The softmax of a query that sees no key would be NaN, and so would its gradient.
        blind = ~_visible(q, k, call).any(-1)
        scores = masked_scores(q, k, call).masked_fill(blind[:, None], 0.0)
        out = torch.softmax(scores, dim=-1).masked_fill(blind[:, None], 0.0) @ v
        lse = torch.logsumexp(scores, dim=-1)
    return out.to(dtype), lse.masked_fill(blind, -math.inf)


def _attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Any:
    if call.is_plain:
        return naive(q, k, v, call.is_causal, call.scale)
    result = naive_with_lse(q, k, v, call)
    return result if call.return_lse else result[0]


IMPLEMENTATIONS = {"naive": Implementation(_attend, frozenset(FEATURES), any_scale=True)}


def _without_autocast(x: Tensor) -> AbstractContextManager[object]:
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def _with_heads_of(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v, repeated so that they have the heads of q."""
    if q.dim() < 3 or k.shape[-3] == q.shape[-3]:
        return k, v
    group = q.shape[-3] // k.shape[-3]
    return k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)


def masked_scores(q: Tensor, k: Tensor, call: Call = PLAIN) -> Tensor:
    """Return the scores q k^T * scale, with -inf for keys that a query does not see.

    The scores are (..., n_queries, n_keys), of q's dtype. A softcap is applied before the mask. q
    and k have the same leading dimensions and dtype.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if call.scale is None else call.scale
    scores = (q @ k.transpose(-2, -1)) * scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.mask[:2] != (None, None):
        scores = scores.masked_fill(~_visible(q, k, call), -math.inf)
    return scores


def _visible(q: Tensor, k: Tensor, call: Call) -> Tensor:
    """Return which keys each query sees, bool (n_queries, n_keys)."""
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    lower, upper = call.mask.bounds(n_queries, n_keys)
    seen = torch.ones(n_queries, n_keys, dtype=torch.bool, device=q.device)
    if lower is not None:
        seen = seen.triu(lower)
    return seen if upper is None else seen.tril(upper)
