"""Attention computed from its definition, with the full score matrix in memory."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from systems.kernels.flash_attention.variant import NO_VARIANT, Packing, Variant


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
    k, v = _with_heads_of(q, k, v)
    return torch.softmax(masked_scores(q, k, is_causal, scale), dim=-1) @ v


def naive_with_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    variant: Variant = NO_VARIANT,
) -> tuple[Tensor, Tensor]:
    """Compute a variant of attention and the log-sum-exp of the scores, from their definition.

    Unlike `naive`, the function computes float16 and bfloat16 inputs in float32, also under
    autocast: results are merged by their log-sum-exp, which must not have errors of 16 bits. The
    arguments are those of `naive`. With is_causal, query i sees only keys up to its position (see
    `Variant`).

    Returns:
        out: (..., n_queries, value_dim), of q's dtype; zero for a query that sees no key.
        lse: (..., n_queries), float32 (float64 for float64 inputs); -inf for such a query.
    """
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    q, k, v = (x.to(wide) for x in (q, *_with_heads_of(q, k, v)))
    with _without_autocast(q):
        # The softmax of a query that sees no key would be NaN, and so would its gradient.
        blind = ~visible(q, k, is_causal, variant).any(-1)
        scores = masked_scores(q, k, is_causal, scale, variant).masked_fill(blind[:, None], 0.0)
        out = torch.softmax(scores, dim=-1).masked_fill(blind[:, None], 0.0) @ v
        lse = torch.logsumexp(scores, dim=-1)
    return out.to(dtype), lse.masked_fill(blind, -math.inf)


def _without_autocast(x: Tensor) -> AbstractContextManager[object]:
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def naive_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    is_causal: bool = False,
    scale: float | None = None,
    variant: Variant = NO_VARIANT,
) -> tuple[Tensor, Tensor]:
    """Compute attention of each packed sequence with `naive_with_lse`.

    q, k and v are (heads, rows of all sequences, head_dim or value_dim), the output is (heads, rows
    of q, value_dim), and lse (heads, rows of q). The boundaries are copied from the GPU.
    """
    lengths_q, lengths_k = (
        starts.diff().tolist() for starts in (packing.starts_q, packing.starts_k)
    )
    sequences = zip(
        q.split(lengths_q, -2), k.split(lengths_k, -2), v.split(lengths_k, -2), strict=True
    )
    results = [naive_with_lse(*x, is_causal, scale, variant) for x in sequences]
    return torch.cat([out for out, _ in results], -2), torch.cat([lse for _, lse in results], -1)


def _with_heads_of(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return k and v, repeated so that they have the heads of q."""
    if q.dim() < 3 or k.shape[-3] == q.shape[-3]:
        return k, v
    group = q.shape[-3] // k.shape[-3]
    return k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)


def masked_scores(
    q: Tensor,
    k: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    variant: Variant = NO_VARIANT,
) -> Tensor:
    """Return the scores q k^T * scale, with -inf for keys that a query does not see.

    The scores are (..., n_queries, n_keys), of q's dtype. A softcap is applied before the mask. q
    and k have the same leading dimensions and dtype. The arguments are those of `naive`.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = (q @ k.transpose(-2, -1)) * scale
    if variant.softcap is not None:
        scores = variant.softcap * torch.tanh(scores / variant.softcap)
    if is_causal or variant != NO_VARIANT:
        scores = scores.masked_fill(~visible(q, k, is_causal, variant), -math.inf)
    return scores


def visible(q: Tensor, k: Tensor, is_causal: bool, variant: Variant = NO_VARIANT) -> Tensor:
    """Return which keys each query sees, bool (n_queries, n_keys)."""
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    lower, upper = variant.mask(is_causal).bounds(n_queries, n_keys)
    seen = torch.ones(n_queries, n_keys, dtype=torch.bool, device=q.device)
    if lower is not None:
        seen = seen.triu(lower)
    return seen if upper is None else seen.tril(upper)
