"""Attention computed from its definition, with the full score matrix in memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def naive(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """Compute softmax(q k^T * scale) v, with all intermediate results in the inputs' dtype.

    This is equation 1 of "Attention Is All You Need" (Vaswani et al. 2017, section 3.2.1). The
    function needs O(n_queries * n_keys) memory.

    Args:
        q: (..., n_queries, head_dim).
        k, v: (..., n_keys, head_dim), with the leading dimensions and dtype of q.
        is_causal: if True, query i attends only to keys 0 to i (the mask is aligned to the upper
            left corner, as in torch).
        scale: multiplies the scores; 1/sqrt(head_dim) by default.

    Returns:
        (..., n_queries, head_dim), of q's dtype.
    """
    return torch.softmax(masked_scores(q, k, is_causal, scale), dim=-1) @ v


def masked_scores(
    q: Tensor, k: Tensor, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """Return the scores q k^T * scale, with -inf for keys that a query does not see.

    Args:
        q: (..., n_queries, head_dim).
        k: (..., n_keys, head_dim), with the leading dimensions and dtype of q.
        is_causal: if True, query i sees only keys 0 to i.
        scale: multiplies the scores; 1/sqrt(head_dim) by default.

    Returns:
        (..., n_queries, n_keys), of q's dtype.
    """
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = (q @ k.transpose(-2, -1)) * scale
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores
