"""FlashAttention-2 in Triton, launched: `flash_forward` and `flash_backward` of any tensors.

Forward is one launch, two where it is split over keys; backward is three, and one more for each of
its two passes that is split. No atomics: equal inputs give equal bits, backward too.

On a CPU the kernels run in Triton's interpreter if TRITON_INTERPRET=1 was in the environment.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from systems.kernels.device import on, runs_kernels
from systems.kernels.flash_attention.configurations import (
    DTYPES,
    MAX_HEAD_DIM,
    MAX_ROW_STRIDE,
    PRECISIONS,
    Configuration,
    block_d,
    configuration,
    heads_in_l2,
    splits,
)

LOG2E = math.log2(math.e)
# Elements to a program of the kernels that only move memory
MOVED = 4096


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    precision: str = "tf32x3",
    tiles: Configuration | None = None,
    n_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T * scale) v and its log-sum-exp, without the score matrix.

    Args:
        q: (..., n_queries, head_dim), float32, bfloat16 or float16, head_dim 1 to 128. Any strides;
            where the last is not 1 a copy is made.
        k, v: (..., n_keys, head_dim), of q's dtype, device and leading dimensions.
        is_causal: query i sees keys 0 to i (aligned upper left, as in torch).
        scale: multiplies the scores; 1/sqrt(head_dim) by default.
        precision: of products of float32 on tensor cores: "tf32x3" (as exact as float32, three
            products of tf32), "tf32" or "ieee" (not on tensor cores).
        tiles: by default those of `configurations.TABLE`.
        n_splits: ranges of keys, each of them a program's; by default `configurations.splits`.

    Returns:
        out: (..., n_queries, head_dim), of q's dtype and, where it is dense, layout; 0 for a query
            without a key.
        lse: float32 (..., n_queries), contiguous: natural-log log-sum-exp of the scaled scores;
            -inf for a query without a key.

    Raises:
        ValueError: names all that does not fit.
        RuntimeError: no GPU, and no interpreter.
    """
    _check(q, k, v, precision)
    out = _empty_like(q)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    if k.shape[-2] == 0:
        return out.zero_(), lse.fill_(-math.inf)
    from systems.kernels.flash_attention.forward_kernel import forward_kernel

    q, scale = _positive_scale(q, scale)
    q, k, v, rows = _heads(q), _heads(k), _heads(v), _heads(out)
    batch, heads, n_queries, head_dim = q.shape
    n_keys = k.shape[2]
    tile = (tiles or configuration(head_dim, q.dtype)).forward
    n_programs = batch * heads
    n_blocks = -(-n_queries // tile.block_q)
    n_seen = min(n_queries, n_keys) if is_causal else n_keys
    n_splits, keys_a_split = _ranges(
        n_seen, tile.block_k, n_programs * n_blocks, q.device, n_splits
    )
    target, target_lse = rows, lse
    if n_splits > 1:
        target = _parts(n_splits, rows)
        target_lse = torch.empty((n_splits, *lse.shape), dtype=torch.float32, device=q.device)
    with on(q.device):
        forward_kernel[n_programs * n_blocks, n_splits](
            q, k, v, target, target_lse,
            *q.stride()[:3], *k.stride()[:3], *v.stride()[:3],
            0 if n_splits == 1 else target.stride(0), *target.stride()[-4:-1],
            n_programs, heads, n_queries, n_keys, keys_a_split,
            heads_in_l2(n_keys, head_dim, k.itemsize, n_programs), scale * LOG2E,
            HEAD_DIM=head_dim, BLOCK_Q=tile.block_q, BLOCK_K=tile.block_k,
            BLOCK_D=block_d(head_dim), IS_CAUSAL=is_causal, PRECISION=precision,
            STAGES=tile.num_stages, num_warps=tile.num_warps,
        )  # fmt: skip
        if n_splits > 1:
            _combine(target, target_lse, rows, lse)
    return out, lse


def flash_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    precision: str = "tf32x3",
    tiles: Configuration | None = None,
    n_splits_dkdv: int | None = None,
    n_splits_dq: int | None = None,
    needs_dq: bool = True,
    needs_dkdv: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of `flash_forward` by q, k and v, from what it returned.

    Args:
        q, k, v, is_causal, scale, precision, tiles: as they were given to `flash_forward`.
        out, lse: as it returned them; lse contiguous.
        dout: of out's shape and dtype, any strides; a copy is made where the last is not 1, as of
            the expanded gradient of a sum.
        n_splits_dkdv: ranges of queries, n_splits_dq: ranges of keys, each of them a program's; by
            default `configurations.splits`.
        needs_dq, needs_dkdv: what is False is not computed.

    Returns:
        dq, dk, dv: of the shapes and dtype of q, k and v, or None.
    """
    _check(q, k, v, precision)
    dq = _empty_like(q) if needs_dq else None
    dk, dv = (_empty_like(k), _empty_like(v)) if needs_dkdv else (None, None)
    if q.numel() == 0 or k.numel() == 0:
        for gradient in (dq, dk, dv):
            if gradient is not None:
                gradient.zero_()
        return dq, dk, dv
    from systems.kernels.flash_attention.backward_kernel import (
        delta_kernel,
        dkdv_kernel,
        dq_kernel,
    )

    is_negated = scale is not None and scale < 0
    q, scale = _positive_scale(q, scale)
    q, k, v, out, dout = (_heads(x) for x in (q, k, v, out, dout))
    batch, heads, n_queries, head_dim = q.shape
    n_keys = k.shape[2]
    n_programs = batch * heads
    tiles = tiles or configuration(head_dim, q.dtype)
    columns = block_d(head_dim)
    delta = torch.empty_like(lse)
    inputs = (q, k, v, dout, lse, delta)
    strides = [s for x in (q, k, v, dout) for s in x.stride()[:3]]
    common = {
        "HEAD_DIM": head_dim, "BLOCK_D": columns, "IS_CAUSAL": is_causal, "PRECISION": precision,
    }  # fmt: skip
    with on(q.device):
        delta_kernel[-(-n_queries // (MOVED // columns)) * n_programs,](
            out, dout, delta, *out.stride()[:3], *dout.stride()[:3], heads, n_queries,
            HEAD_DIM=head_dim, ROWS=MOVED // columns, COLUMNS=columns,
        )  # fmt: skip
        if dk is not None and dv is not None:
            tile = tiles.dkdv
            n_blocks = -(-n_keys // tile.block_k)
            n_splits, queries_a_split = _ranges(
                n_queries, tile.block_q, n_programs * n_blocks, q.device, n_splits_dkdv
            )
            dk_rows, dv_rows = _heads(dk), _heads(dv)
            dk_target, dv_target = dk_rows, dv_rows
            if n_splits > 1:
                dk_target, dv_target = _parts(n_splits, dk_rows), _parts(n_splits, dv_rows)
            dkdv_kernel[n_programs * n_blocks, n_splits](
                *inputs, dk_target, dv_target, *strides,
                0 if n_splits == 1 else dk_target.stride(0), *dk_target.stride()[-4:-1],
                0 if n_splits == 1 else dv_target.stride(0), *dv_target.stride()[-4:-1],
                n_programs, heads, n_queries, n_keys, queries_a_split,
                heads_in_l2(n_queries, head_dim, q.itemsize, n_programs), scale, scale * LOG2E,
                BLOCK_Q=tile.block_q, BLOCK_K=tile.block_k, STAGES=tile.num_stages,
                num_warps=tile.num_warps, **common,
            )  # fmt: skip
            if n_splits > 1:
                _sum(dk_target, dk_rows)
                _sum(dv_target, dv_rows)
        if dq is not None:
            tile = tiles.dq
            n_blocks = -(-n_queries // tile.block_q)
            n_seen = min(n_queries, n_keys) if is_causal else n_keys
            n_splits, keys_a_split = _ranges(
                n_seen, tile.block_k, n_programs * n_blocks, q.device, n_splits_dq
            )
            dq_rows = _heads(dq)
            dq_target = _parts(n_splits, dq_rows) if n_splits > 1 else dq_rows
            dq_kernel[n_programs * n_blocks, n_splits](
                *inputs, dq_target, *strides,
                0 if n_splits == 1 else dq_target.stride(0), *dq_target.stride()[-4:-1],
                n_programs, heads, n_queries, n_keys, keys_a_split,
                heads_in_l2(n_keys, head_dim, k.itemsize, n_programs), scale, scale * LOG2E,
                BLOCK_Q=tile.block_q, BLOCK_K=tile.block_k, STAGES=tile.num_stages,
                num_warps=tile.num_warps, **common,
            )  # fmt: skip
            if n_splits > 1:
                _sum(dq_target, dq_rows)
            if is_negated:  # the gradient so far is that of -q
                dq.neg_()
    return dq, dk, dv


def _combine(parts: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """`combine_kernel` on parts (splits, batch, heads, rows, head_dim)."""
    from systems.kernels.flash_attention.combine_kernel import combine_kernel

    n_splits, batch, heads, n_rows, head_dim = parts.shape
    columns = block_d(head_dim)
    rows = MOVED // columns
    combine_kernel[-(-n_rows // rows) * batch * heads,](
        parts, part_lse, out, lse, *out.stride()[:3], batch * heads, heads, n_rows, n_splits,
        HEAD_DIM=head_dim, ROWS=rows, COLUMNS=columns,
    )  # fmt: skip


def _sum(parts: Tensor, out: Tensor) -> None:
    """`sum_kernel` on parts (splits, batch, heads, rows, head_dim)."""
    from systems.kernels.flash_attention.combine_kernel import sum_kernel

    n_splits, batch, heads, n_rows, head_dim = parts.shape
    columns = block_d(head_dim)
    rows = MOVED // columns
    sum_kernel[-(-n_rows // rows) * batch * heads,](
        parts, out, *out.stride()[:3], batch * heads, heads, n_rows, n_splits,
        HEAD_DIM=head_dim, ROWS=rows, COLUMNS=columns,
    )  # fmt: skip


def _parts(n_splits: int, like: Tensor) -> Tensor:
    return torch.empty((n_splits, *like.shape), dtype=torch.float32, device=like.device)


def _ranges(
    length: int, block: int, n_programs: int, device: torch.device, n_splits: int | None
) -> tuple[int, int]:
    """How many ranges an inner loop over `length` rows is cut into, and rows of each.

    A range is whole tiles, so there may be fewer ranges than were asked for. The last has no end
    but that of its rows: what a causal pass does not see adds nothing.
    """
    n_tiles = -(-length // block)
    if n_splits is None:
        n_splits = splits(n_programs, n_tiles, _multiprocessors(device))
    tiles_a_split = -(-n_tiles // min(n_splits, n_tiles))
    return -(-n_tiles // tiles_a_split), tiles_a_split * block


def _check(q: Tensor, k: Tensor, v: Tensor, precision: str) -> None:
    errors = []
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if min(q.dim(), k.dim(), v.dim()) < 2:
        errors.append(f"q, k and v are (..., rows, head_dim), got {shapes}")
    else:
        if k.shape != v.shape or q.shape[:-2] != k.shape[:-2] or q.shape[-1] != k.shape[-1]:
            errors.append(
                "q must be (..., n_queries, head_dim) and k and v (..., n_keys, head_dim) with the "
                f"same leading dimensions, got {shapes}"
            )
        if not 1 <= q.shape[-1] <= MAX_HEAD_DIM:
            errors.append(f"head_dim must be 1 to {MAX_HEAD_DIM}, got {q.shape[-1]}")
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        errors.append(
            f"q, k and v must have one dtype of {DTYPES}, got {[q.dtype, k.dtype, v.dtype]}"
        )
    if not q.device == k.device == v.device:
        errors.append(f"q, k and v must be on one device, got {[str(x.device) for x in (q, k, v)]}")
    if precision not in PRECISIONS:
        errors.append(f"precision must be one of {PRECISIONS}, got {precision!r}")
    if errors:
        raise ValueError("; ".join(errors))
    if not runs_kernels(q.device):
        raise RuntimeError(
            f"the Triton kernels need a GPU, got tensors on {q.device}; TRITON_INTERPRET=1 in the "
            "environment interprets them on a CPU"
        )


def _positive_scale(q: Tensor, scale: float | None) -> tuple[Tensor, float]:
    """The kernels take the scale out of a maximum, which a negative one would make a minimum."""
    if scale is None:
        return q, 1 / math.sqrt(q.shape[-1])
    scale = float(scale)  # an integer would be compiled for its value
    return (-q, -scale) if scale < 0 else (q, scale)


def _heads(x: Tensor) -> Tensor:
    """(batch, heads, rows, head_dim) of (..., rows, head_dim): a view unless the kernels could not
    address it, or its leading dimensions have strides of their own each.

    A copy costs far less than reading rows element by element, what a last stride that is not 1
    would come to.
    """
    if (x.stride(-1) != 1 and x.shape[-1] > 1) or x.stride(-2) >= MAX_ROW_STRIDE:
        x = x.contiguous()
    if x.dim() == 4:
        return x
    *leading, rows, head_dim = x.shape
    heads = leading[-1] if leading else 1
    return x.reshape(math.prod(leading[:-1]), heads, rows, head_dim)


def _empty_like(x: Tensor) -> Tensor:
    """Of x's layout where `_heads` makes a view of that, else contiguous."""
    if x.dim() <= 4 and x.stride(-1) == 1:
        like = torch.empty_like(x)
        if like.stride(-1) == 1 and like.stride(-2) < MAX_ROW_STRIDE:
            return like
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _multiprocessors(device: torch.device) -> int:
    return _multiprocessors_of(device.index) if device.type == "cuda" else 1


@functools.cache
def _multiprocessors_of(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
