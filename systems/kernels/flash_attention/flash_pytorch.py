"""FlashAttention-2 in plain torch, one tile at a time: a readable version of the GPU kernels.

    out = FlashAttentionPyTorch.apply(q, k, v, is_causal)

The full (n_queries, n_keys) score matrix is never in memory. Forward saves the log-sum-exp L of
each row of scores. Backward recomputes the softmax from q, k and L. The algorithms are algorithms 1
and 2 of FlashAttention-2 (Dao 2023, https://arxiv.org/abs/2307.08691).
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

from systems.kernels.flash_attention.call import VALUE_DIM, Call, Implementation

# Number of queries and number of keys per tile. A tile of scores takes 1 MiB per head in float32,
# and backward holds three such tiles at the same time. Tiles of this size give each kernel enough
# work to hide Python's launch overhead.
QUERY_TILE = 512
KEY_TILE = 512


class FlashAttentionPyTorch(torch.autograd.Function):
    """Compute softmax(q k^T * scale) v in O(n_queries + n_keys) memory, forward and backward.

        out = FlashAttentionPyTorch.apply(q, k, v, is_causal, scale)

    The last two are optional: is_causal=False, and scale=None for 1/sqrt(head_dim).

    All computations are in float32 (float64 for float64 inputs), also under autocast. The results
    are rounded to the dtype of the inputs once at the end. On a GPU,
    torch.backends.cuda.matmul.allow_tf32 applies to the float32 matmuls. The results are
    deterministic. Second derivatives are not supported.

    Args:
        q: (..., n_queries, head_dim), any float dtype, any strides.
        k: (..., n_keys, head_dim), with the leading dimensions and dtype of q.
        v: (..., n_keys, value_dim), with the leading dimensions and dtype of q.
        is_causal: if True, query i sees only keys 0 to i (aligned to the upper left, as in torch).

    Returns:
        The attention output, (..., n_queries, value_dim), of q's dtype; zeros if n_keys is 0.
    """

    # Whether backward compiles `_backward_tile` with torch.compile; None: only on a GPU. On a CPU,
    # compilation takes seconds, needs a C++ compiler and gains little. The environment variable
    # TORCH_COMPILE_DISABLE=1 also disables compilation.
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
        """Compute the attention output, and save q, k, v and the results of `tiled_forward`."""
        if not isinstance(is_causal, bool):  # a Call would count as True
            raise ValueError(f"is_causal must be True or False, got {type(is_causal).__name__}")
        out, lse = tiled_forward(q, k, v, is_causal, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.is_causal, ctx.scale = is_causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """Return the gradients of q, k and v, and None for the others. dout has any strides."""
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = tiled_backward(q, k, v, out, lse, dout, ctx.is_causal, ctx.scale)
        return dq, dk, dv, None, None


def _attend(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    return FlashAttentionPyTorch.apply(q, k, v, call.is_causal, call.scale)


IMPLEMENTATIONS = {"flash_pytorch": Implementation(_attend, frozenset({VALUE_DIM}), any_scale=True)}


@torch.no_grad()
def tiled_forward(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return the attention output and its log-sum-exp (algorithm 1 of FlashAttention-2).

    The softmax of a query is known only after its last tile of keys. Before, each query has three
    running values (online softmax): the maximum m of its scores, the sum l of exp(score - m), and
    the sum O of exp(score - m) v. If a tile of keys increases m, then l and O are first multiplied
    by exp(old m - new m).

    The arguments are those of `FlashAttentionPyTorch`.

    Returns:
        out: (..., n_queries, value_dim), of q's dtype.
        lse: natural-log log-sum-exp of the scaled scores, (..., n_queries), float32 (float64 for
            float64 inputs); -inf if n_keys is 0.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    t = _Tiles.of(q, k, is_causal)
    with torch.autocast(q.device.type, enabled=False):
        qs = _tiled(q, t.rows, wide).mul_(_scale(q, scale))
        ks, vs = _tiled(k, t.columns, wide), _tiled(v, t.columns, wide)
        outs = torch.zeros((*qs.shape[:3], v.shape[-1]), dtype=wide, device=q.device)
        lses = torch.full(qs.shape[:3], -math.inf, dtype=wide, device=q.device)
        for i, q_tile in enumerate(qs):
            # total is l, and weighted is O.
            m, total, weighted = lses[i], torch.zeros_like(lses[i]), outs[i]
            for j in t.key_tiles(i):
                scores = q_tile @ ks[j].mT
                if not t.is_visible(i, j):
                    scores.masked_fill_(t.hidden(i, j), -math.inf)
                # Every query sees key 0, which is in the first tile. So m_now is finite, and
                # exp(-inf - -inf) = NaN cannot occur below. If a query sees no key of a later
                # tile, every p of the query is exp(-inf) = 0.
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
    """Return the gradients dq, dk and dv (algorithm 2 of FlashAttention-2).

    If a query sees only one key, the exact gradient of its score is 0, but this function returns a
    rounding error: the difference of two sums of the same terms in different orders. dout has out's
    shape and any strides. The other arguments are those and the results of `tiled_forward`.
    """
    wide = lse.dtype
    t = _Tiles.of(q, k, is_causal)
    step = _backward_step(q.device)
    with torch.autocast(q.device.type, enabled=False):
        # D in the paper: rowsum(P * dP), which is equal to rowsum(out * dout).
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
        dqs.mul_(_scale(q, scale))  # dk is computed from scaled qs, so it is already scaled
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
    """Add the contribution of one tile of scores to the gradients dq, dk and dv, in place.

        S = Q K^T, P = exp(S - L)
        dV += P^T dO
        dP = dO V^T, dS = P * (dP - D)
        dQ += dS K, dK += dS^T Q

    Q is the tile of queries, already multiplied by the scale, K and V are the tile of keys and
    values, dO is the gradient of the output, and L is the log-sum-exp of the scores. D is
    rowsum(output * dO).

    All arguments are tensors, because torch.compile would recompile the function for each value of
    an int or float argument.

    Q and dQ are (batch, rows, head_dim), K and dK are (batch, columns, head_dim), V and dV are
    (batch, columns, value_dim), dO is (batch, rows, value_dim), and L and D (`delta`) are (batch,
    rows). Query i of the tile sees only the keys at positions below limit[i]. `limit` is (rows,),
    and `key` (columns,) has the positions of the keys in the sequence.
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
    if torch.compiler.is_compiling():  # compiled together with its caller
        return _backward_tile
    compiled = FlashAttentionPyTorch.compiled
    if compiled is None:
        compiled = device.type == "cuda"
    return _compiled_backward_tile() if compiled else _backward_tile


class _Tiles(NamedTuple):
    """Division of the queries and keys into tiles, and the causal mask of each tile.

    The last tile is padded, so that `_backward_tile` is compiled only for one shape.
    """

    n_queries: int
    n_keys: int
    rows: int  # number of queries per tile
    columns: int  # number of keys per tile
    is_causal: bool
    # int64 (number of query tiles, rows): position of the first key that each query does not see
    limits: Tensor
    keys: Tensor  # int64 (number of key tiles, columns): position of each key

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
        """Return an iterator over the indices of the key tiles that some query of tile i sees."""
        end = min(self.n_keys, (i + 1) * self.rows) if self.is_causal else self.n_keys
        return iter(range(-(-end // self.columns)))

    def is_visible(self, i: int, j: int) -> bool:
        """Return whether every query of tile i sees every key of tile j; False if j has padding."""
        end = (j + 1) * self.columns
        return end <= self.n_keys and (not self.is_causal or end <= i * self.rows + 1)

    def hidden(self, i: int, j: int) -> Tensor:
        """Return which keys of tile j each query of tile i does not see, bool (rows, columns)."""
        return self.keys[j] >= self.limits[i][:, None]


def _tiled(x: Tensor, size: int, dtype: torch.dtype, fill: float = 0.0) -> Tensor:
    """Copy x (..., n, d) to contiguous tiles (number of tiles, batch, size, d).

    The last tile is padded with `fill`. batch is the product of the leading dimensions.
    """
    n, d = x.shape[-2:]
    tiles = -(-n // size)
    flat = pad(x.to(dtype), (0, 0, 0, tiles * size - n), value=fill)
    flat = flat.reshape(math.prod(x.shape[:-2]), tiles, size, d)
    return flat.transpose(0, 1).clone(memory_format=torch.contiguous_format)


def _untiled(tiles: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Undo `_tiled`: join tiles (number of tiles, batch, size, ...) to (batch, n, ...) of dtype."""
    return tiles.transpose(0, 1).flatten(1, 2)[:, :n].to(dtype).contiguous()


def _scale(q: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale
