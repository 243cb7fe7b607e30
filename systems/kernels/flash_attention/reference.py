"""Attention and its gradients in float64, to which the tests compare all implementations.

The scores are computed in blocks of queries, because the full score matrix of one head with 65,536
tokens would take 34 GB in float64.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from systems.kernels.flash_attention.call import PLAIN, Call

BLOCK_BYTES = 1 << 29  # size of a block of float64 scores; up to about four blocks exist at a time


class AttentionReference(NamedTuple):
    """Attention output, log-sum-exp and gradients in float64.

    Fields:
        out: output of attention, (..., n_queries, value_dim).
        lse: (..., n_queries), natural-log log-sum-exp of the scaled scores, -inf if all are hidden.
        dq: gradient of q, (..., n_queries, head_dim).
        dk, dv: gradients of k and v, with their shapes.
    """

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


@torch.no_grad()
def attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    call: Call = PLAIN,
) -> AttentionReference:
    """Compute attention, softmax(q k^T * scale) v, its log-sum-exp and its gradients in float64.

    The gradients are computed with explicit formulas, without autograd (FlashAttention-2, Dao 2023,
    section 2.2). With the probabilities P, the output O and its gradient dO:

        dV = P^T dO    dP = dO V^T    dS = P * (dP - rowsum(dO * O))
        dQ = scale dS K    dK = scale dS^T Q

    With a softcap c, the scores S are replaced by S' = c tanh(S / c), and dS is multiplied by
    1 - (S' / c)^2.

    Args:
        q: (..., n_queries, head_dim), any float dtype.
        k, v: (..., n_keys, head_dim or value_dim), with the leading dimensions of q, or with fewer
            heads (see `naive.naive`).
        dout: gradient of the output, (..., n_queries, value_dim).
        call: without packing.
    """
    if q.dim() > 2 and k.shape[-3] != q.shape[-3]:
        shape, group = k.shape, q.shape[-3] // k.shape[-3]
        k, v = (x.repeat_interleave(group, -3) for x in (k, v))
        out, lse, dq, dk, dv = attention_reference(q, k, v, dout, call)
        dk, dv = (x.unflatten(-3, (shape[-3], group)).sum(-3) for x in (dk, dv))
        return AttentionReference(out, lse, dq, dk, dv)
    scale = 1 / math.sqrt(q.shape[-1]) if call.scale is None else call.scale
    q, k, v, dout = (t.detach().double() for t in (q, k, v, dout))
    n_queries, n_keys = q.shape[-2], k.shape[-2]
    lower, upper = call.mask.bounds(n_queries, n_keys)
    heads = max(1, math.prod(q.shape[:-2]))
    rows = max(1, BLOCK_BYTES // (8 * n_keys * heads)) if n_keys else max(1, n_queries)
    out, dq = torch.empty_like(dout), torch.empty_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    lse = torch.empty(q.shape[:-1], dtype=torch.float64, device=q.device)
    for start in range(0, n_queries, rows):
        block = slice(start, min(start + rows, n_queries))
        # With a causal mask, the queries of this block see no key past the end of the block.
        seen = n_keys if upper is None else max(0, min(n_keys, block.stop + upper))
        keys, values = k[..., :seen, :], v[..., :seen, :]
        scores = q[..., block, :] @ keys.transpose(-2, -1) * scale
        capped = None
        if call.softcap is not None:
            capped = torch.tanh(scores / call.softcap)
            scores = capped * call.softcap
        hidden = torch.zeros(scores.shape[-2:], dtype=torch.bool, device=q.device)
        query = torch.arange(block.start, block.stop, device=q.device)[:, None]
        key = torch.arange(seen, device=q.device)
        if upper is not None:
            hidden |= key > query + upper
        if lower is not None:
            hidden |= key < query + lower
        scores.masked_fill_(hidden, -math.inf)
        lse[..., block] = torch.logsumexp(scores, dim=-1)
        # Without the second mask, P would be NaN for a query that sees no key.
        p = scores.sub_(lse[..., block, None]).exp_().masked_fill_(hidden, 0.0)
        out[..., block, :] = p @ values
        d = dout[..., block, :]
        dv[..., :seen, :] += p.transpose(-2, -1) @ d
        ds = d @ values.transpose(-2, -1)
        ds -= (d * out[..., block, :]).sum(-1, keepdim=True)
        ds *= p
        if capped is not None:
            ds *= 1 - capped.square()
        dq[..., block, :] = ds @ keys * scale
        dk[..., :seen, :] += ds.transpose(-2, -1) @ q[..., block, :] * scale
    return AttentionReference(out, lse, dq, dk, dv)
