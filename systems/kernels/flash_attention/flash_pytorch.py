"""FlashAttention-2 in plain torch, tile by tile: a readable counterpart of the fused kernels.

    out = FlashAttentionPyTorch.apply(q, k, v, is_causal)

The n_queries x n_keys matrix of scores is never in memory as a whole. Forward saves only its
row-wise log-sum-exp L; backward recomputes the scores from q, k and L (Dao 2023, FlashAttention-2,
https://arxiv.org/abs/2307.08691, algorithms 1 and 2).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

# Queries and keys per tile. A tile of scores takes 1 MiB per head in float32, and backward holds
# three at a time. Tiles of this size give each kernel enough work to hide Python's launch overhead.
QUERY_TILE = 512
KEY_TILE = 512


class FlashAttentionPyTorch(torch.autograd.Function):
    """Compute softmax(q k^T * scale) v in O(n_queries + n_keys) memory, forward and backward.

        out = FlashAttentionPyTorch.apply(q, k, v, is_causal, scale)

    The defaults are is_causal=False and scale=None. Computes in float32 (float64 for float64
    inputs) and rounds once at the end, also under autocast. On a GPU, float32 matmuls follow
    torch.backends.cuda.matmul.allow_tf32. Deterministic. Only first derivatives are supported.

    Args:
        q: (..., n_queries, head_dim), any float dtype, any strides.
        k: (..., n_keys, head_dim), with q's leading dimensions and dtype, like v.
        v: (..., n_keys, value_dim).
        is_causal: query i sees keys 0 to i (aligned upper left, as in torch).
        scale: multiplies the scores; 1/sqrt(head_dim) by default.

    Returns:
        (..., n_queries, value_dim), of q's dtype; zeros if n_keys is 0.

    Saves for backward: q, k, v, out, and the natural-log log-sum-exp of the scaled scores,
    (..., n_queries) in float32 (float64); -inf if n_keys is 0.
    """

    # Use torch.compile for the tile function of backward: True, False, or None for GPUs only. On a
    # CPU compilation takes seconds, needs a C++ compiler and gains little. TORCH_COMPILE_DISABLE=1
    # in the environment disables it, too.
    compiled: ClassVar[bool | None] = None

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        scale: float | None = None,
    ) -> Tensor:
        """Return out; see the class for the arguments."""
        out, lse = tiled_forward(q, k, v, is_causal, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.is_causal, ctx.scale = is_causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Return dq, dk and dv, given dout (..., n_queries, value_dim) of any strides."""
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = tiled_backward(q, k, v, out, lse, dout, ctx.is_causal, ctx.scale)
        return dq, dk, dv, None, None


@torch.no_grad()
def tiled_forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return out and lse, computed by algorithm 1 of FlashAttention-2.

    The softmax of a row is not known before its last key (online softmax). So each query has a
    running maximum m, a running sum of exp(score - m) and a running sum of exp(score - m) v: m, l
    and O in the paper. When a tile of keys raises m, the earlier sums are multiplied by
    exp(m_before - m_now).
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    t = _Tiles.of(q, k, is_causal)
    with torch.autocast(q.device.type, enabled=False):
        qs = _tiled(q, t.rows, wide).mul_(_scale(q, scale))
        ks, vs = _tiled(k, t.columns, wide), _tiled(v, t.columns, wide)
        outs = torch.zeros((*qs.shape[:3], v.shape[-1]), dtype=wide, device=q.device)
        lses = torch.full(qs.shape[:3], -math.inf, dtype=wide, device=q.device)
        for i, q_tile in enumerate(qs):
            m, total, weighted = lses[i], torch.zeros_like(lses[i]), outs[i]
            for j in t.key_tiles(i):
                scores = q_tile @ ks[j].mT
                if not t.is_visible(i, j):
                    scores.masked_fill_(t.hidden(i, j), -math.inf)
                # m_now is finite, because every query sees key 0, which is in the first tile. So
                # exp(-inf - -inf) = NaN cannot occur below. In a later tile whose keys are all
                # hidden from a row, every p of this row is exp(-inf) = 0.
                m_now = torch.maximum(m, scores.amax(-1))
                p = scores.sub_(m_now[..., None]).exp_()
                shrink = torch.exp(m - m_now)
                total = total * shrink + p.sum(-1)
                weighted = torch.baddbmm(weighted * shrink[..., None], p, vs[j])
                m = m_now
            if t.n_keys:
                outs[i] = weighted / total[..., None]
                lses[i] = m + torch.log(total)
    out = _untiled(outs, t.n_queries, q.dtype).view(*q.shape[:-1], v.shape[-1])
    return out, _untiled(lses, t.n_queries, wide).view(q.shape[:-1])


@torch.no_grad()
def tiled_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv, computed by algorithm 2 of FlashAttention-2.

    If a query sees only one key, the exact gradient of its score is 0. Here it is computed as
    dP - D, the difference of two sums of the same terms in different order, so float32 rounding
    errors remain. A softmax that saves its probabilities gives exactly 0.

    Args:
        out, lse: as returned by `tiled_forward`.
        dout: of out's shape, any strides.
    """
    wide = lse.dtype
    t = _Tiles.of(q, k, is_causal)
    step = _backward_step(q.device)
    with torch.autocast(q.device.type, enabled=False):
        # D in the paper. It is rowsum(P * dP) = rowsum(out * dout), which needs no scores.
        delta = (out.to(wide) * dout.to(wide)).sum(-1)
        qs = _tiled(q, t.rows, wide).mul_(_scale(q, scale))
        douts = _tiled(dout, t.rows, wide)
        # A padding row has lse = inf, so its P is exp(-inf) = 0.
        lses, deltas = (
            _tiled(x[..., None], t.rows, wide, fill)[..., 0]
            for x, fill in ((lse, math.inf), (delta, 0.0))
        )
        ks, vs = _tiled(k, t.columns, wide), _tiled(v, t.columns, wide)
        dqs, dks, dvs = torch.zeros_like(qs), torch.zeros_like(ks), torch.zeros_like(vs)
        for i in range(len(qs)):
            for j in t.key_tiles(i):
                step(
                    qs[i], ks[j], vs[j], douts[i], lses[i], deltas[i],
                    t.limits[i], t.keys[j], dqs[i], dks[j], dvs[j],
                )  # fmt: skip
        dqs.mul_(_scale(q, scale))  # dk is already scaled, since it was computed from scaled qs
    return (
        _untiled(dqs, t.n_queries, q.dtype).view(q.shape),
        _untiled(dks, t.n_keys, k.dtype).view(k.shape),
        _untiled(dvs, t.n_keys, v.dtype).view(v.shape),
    )


def _backward_tile(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    limit: Tensor,
    key: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Add the contribution of one tile to dq, dk and dv.

        S = Q K^T, P = exp(S - L)
        dV += P^T dO
        dP = dO V^T, dS = P * (dP - D)
        dQ += dS K, dK += dS^T Q

    Q is already multiplied by the scale. All arguments are tensors with the same shapes and strides
    in every call, because torch.compile would recompile for each value of an int or a float.

    Args:
        q, dq: (batch, rows, head_dim).
        k, dk: (batch, columns, head_dim).
        v, dv: (batch, columns, value_dim).
        dout: (batch, rows, value_dim).
        lse, delta: L and D, (batch, rows).
        limit: (rows,), position of the first key that a query does not see.
        key: (columns,), positions of the keys.
    """
    p = torch.exp(q @ k.mT - lse[..., None]).masked_fill(key >= limit[:, None], 0.0)
    ds = p * (dout @ v.mT - delta[..., None])
    dv.baddbmm_(p.mT, dout)
    dq.baddbmm_(ds, k)
    dk.baddbmm_(ds.mT, q)


@functools.cache
def _compiled_backward_tile() -> Callable[..., None]:
    return torch.compile(_backward_tile, dynamic=False)


def _backward_step(device: torch.device) -> Callable[..., None]:
    if torch.compiler.is_compiling():  # torch.compile traces the tile function with its caller
        return _backward_tile
    compiled = FlashAttentionPyTorch.compiled
    if compiled is None:
        compiled = device.type == "cuda"
    return _compiled_backward_tile() if compiled else _backward_tile


class _Tiles(NamedTuple):
    """Division of queries and keys into tiles, and the keys that each query sees.

    All tiles have the same shape (the last is padded), so `_backward_tile` is compiled once.
    """

    n_queries: int
    n_keys: int
    rows: int  # queries per tile
    columns: int  # keys per tile
    is_causal: bool
    limits: Tensor  # int64 (query tiles, rows): position of the first key that a query does not see
    keys: Tensor  # int64 (key tiles, columns): positions of the keys

    @classmethod
    def of(cls, q: Tensor, k: Tensor, is_causal: bool) -> _Tiles:
        n_queries, n_keys = q.shape[-2], k.shape[-2]
        rows, columns = max(1, min(QUERY_TILE, n_queries)), max(1, min(KEY_TILE, n_keys))
        query_tiles, key_tiles = -(-n_queries // rows), -(-n_keys // columns)
        limits = torch.full((query_tiles * rows,), n_keys, device=q.device)
        if is_causal:
            limits = torch.arange(1, len(limits) + 1, device=q.device).clamp_(max=n_keys)
        keys = torch.arange(key_tiles * columns, device=q.device)
        limits, keys = limits.view(query_tiles, rows), keys.view(key_tiles, columns)
        return cls(n_queries, n_keys, rows, columns, is_causal, limits, keys)

    def key_tiles(self, i: int) -> Iterator[int]:
        """Iterate over the key tiles that query tile i sees, without those above the diagonal."""
        end = min(self.n_keys, (i + 1) * self.rows) if self.is_causal else self.n_keys
        return iter(range(-(-end // self.columns)))

    def is_visible(self, i: int, j: int) -> bool:
        """Return True if every query of tile i sees every key of tile j."""
        end = (j + 1) * self.columns
        return end <= self.n_keys and (not self.is_causal or end <= i * self.rows + 1)

    def hidden(self, i: int, j: int) -> Tensor:
        """Return bool (rows, columns): True where a query of tile i cannot see a key of tile j."""
        return self.keys[j] >= self.limits[i][:, None]


def _tiled(x: Tensor, size: int, dtype: torch.dtype, fill: float = 0.0) -> Tensor:
    """Copy (..., n, d) to a contiguous (tiles, batch, size, d); pad the last tile with `fill`."""
    n, d = x.shape[-2:]
    tiles = -(-n // size)
    flat = pad(x.to(dtype), (0, 0, 0, tiles * size - n), value=fill)
    flat = flat.reshape(math.prod(x.shape[:-2]), tiles, size, d)
    return flat.transpose(0, 1).clone(memory_format=torch.contiguous_format)


def _untiled(tiles: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Undo `_tiled`: copy (tiles, batch, size, ...) to a contiguous (batch, n, ...)."""
    return tiles.transpose(0, 1).flatten(1, 2)[:, :n].to(dtype).contiguous()


def _scale(q: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale
