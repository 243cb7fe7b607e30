"""Backward pass of FlashAttention-2 in Triton (Dao 2023, algorithm 2), in three launches.

Q, K and V are the queries, keys and values, and O is the attention output. S = Q K^T are the
scores, P is the softmax of the scaled scores, and L is their log-sum-exp. For a tensor X, dX is the
gradient of X.

    delta_kernel   D = rowsum(dO * O)
    dkdv_kernel    one program per block of keys, which loops over the queries that see it:
                       P^T = exp(scale K Q^T - L)      dV += P^T dO
                       dS^T = P^T * (V dO^T - D)       dK += dS^T Q
                   If the registers cannot hold dK and dV together, each has a separate launch.
    dq_kernel      one program per block of queries, which loops over the keys that they see:
                       P = exp(scale Q K^T - L)    dS = P * (dO V^T - D)    dQ += dS K

At the end, dK and dQ are multiplied by the scale.

In algorithm 2, every block of keys adds to dQ. This needs atomic additions in an order that is not
fixed, so the rounding of dQ is not reproducible. Here a separate kernel computes dQ. No two
programs add to the same gradient, and equal inputs give bitwise equal gradients. The disadvantage
is that both kernels compute S and dP = dO V^T. A tile therefore needs 7 matmuls instead of 5.

dkdv_kernel computes the transposed S^T and dP^T. Their products can then be used in the next matmul
without a transposition, and they stay in registers. This also avoids a bug of Triton versions
before 3.8 on Hopper GPUs (triton-lang/triton #9433).

With few heads, there are too few programs to fill the GPU. The queries of dkdv_kernel or the keys
of dq_kernel are then split into ranges, and a separate program processes each range. The programs
write partial gradients in float32, and `combine_kernel.sum_kernel` adds them.

Arguments of the functions that process one tile:

    half_stride    distance from the high to the low float16 half of a tensor in memory, in
                   elements; used only with FP16X3
    dp_unit        factor that undoes the scaling of the inputs in dP (see `_units`)
    scale_log2e    scale of the scores times log2(e); with FP16X3, also times the units of q and k
                   (see `tile_ops.unit`)
    MASKED         whether the tile needs a mask, because it is on the diagonal or is incomplete
"""

# Kernel arguments have Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from systems.kernels.flash_attention.triton.tile_ops import (
    SMALLEST,
    TOP_INVERSE,
    TOP_POWER,
    add_product,
    as_operand,
    head_base,
    load_operand,
    load_rows,
    load_tile,
    product,
    scaled,
    schedule,
    store_tile,
    transposed,
    unit,
    unscaled,
)

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["n_heads", "n_queries"])
def delta_kernel(
    out, dout, delta,
    out_batch, out_head, out_row, dout_batch, dout_head, dout_row, n_heads, n_queries,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute delta = rowsum(dO * O), which the other kernels of the backward pass need.

    O is the attention output, and dO is its gradient. The result is D in algorithm 2 of
    FlashAttention-2 (line 4).

    Grid: (number of blocks of ROWS queries * batch * heads,).

    Args:
        out, dout: O and dO, (batch, heads, n_queries, HEAD_DIM).
        delta: float32 (batch, heads, n_queries), contiguous. The kernel writes it.
        out_*, dout_*: strides of out and dout, in elements.
        ROWS: number of queries per program.
        COLUMNS: HEAD_DIM rounded up to a power of two, at least 16.
    """
    n_blocks = tl.cdiv(n_queries, ROWS)
    head = tl.program_id(0) // n_blocks
    first = tl.program_id(0) % n_blocks * ROWS
    out = head_base(out, head, n_heads, out_batch, out_head)
    dout = head_base(dout, head, n_heads, dout_batch, dout_head)
    o = load_tile(out, first, n_queries, out_row, HEAD_DIM, ROWS, COLUMNS, True)
    do = load_tile(dout, first, n_queries, dout_row, HEAD_DIM, ROWS, COLUMNS, True)
    total = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    row = first + tl.arange(0, ROWS)
    tl.store(delta + head.to(tl.int64) * n_queries + row, total, mask=row < n_queries)


@triton.jit
def _units(peaks, head, n_programs, FP16X3: tl.constexpr):
    """Return five factors that undo the scaling of the inputs in S, dP, dQ, dK and dV.

    With FP16X3 (float32 inputs that are split into float16 halves), each head of q, k, v and dO is
    divided by a power of two, its unit. A matrix product must be multiplied by the units of its
    operands. The factor for dV also undoes the multiplication of the softmax P by 2^14 (TOP_POWER).
    Without FP16X3, all factors are 1.

    Args:
        peaks, head, n_programs: as in `tile_ops.peak_of`.
    """
    s, dp, dq, dk, dv = 1.0, 1.0, 1.0, 1.0, 1.0
    if FP16X3:
        q, k = unit(peaks, 0, head, n_programs), unit(peaks, 1, head, n_programs)
        v, do = unit(peaks, 2, head, n_programs), unit(peaks, 3, head, n_programs)
        s, dp, dq, dk, dv = q * k, v * do, k, q, do * TOP_INVERSE
    return s, dp, dq, dk, dv


@triton.jit
def _add_scaled(
    total, peak, ds, other, DTYPE: tl.constexpr, FP16X3: tl.constexpr, PRECISION: tl.constexpr
):
    """Return total + dS @ other in float32, and the new peaks of the rows of dS.

    With FP16X3, dS is converted to float16 halves. Its magnitudes have no known bound, so each row
    is first divided by a power of two (see `tile_ops.scaled`). The same row of the sum has the same
    scale. Without FP16X3, nothing is scaled, and `peak` is returned unchanged.

    Args:
        total: sum of the earlier products.
        peak: largest magnitude of each row of dS in the earlier calls.
        ds: float32 tile of dS.
        other: the second operand of the product (see `tile_ops.load_operand`).
        DTYPE: dtype to which ds is rounded without FP16X3.
    """
    if FP16X3:
        ds, peak, correction = scaled(ds, peak)
        total = total * correction[:, None]
    return add_product(total, as_operand(ds, DTYPE, FP16X3), other, FP16X3, PRECISION), peak


@triton.jit
def _add_queries(
    dk, dv, peak, k, v, query, dout, lse, delta, first_key, first_query, n_queries, half_stride,
    q_row, dout_row, scale_log2e, dp_unit,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    IS_CAUSAL: tl.constexpr, MASKED: tl.constexpr, FP16X3: tl.constexpr, PRECISION: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Add the contribution of one tile of queries to dK and dV (algorithm 2, lines 11 to 16).

    The running values dK and dV belong to one block of keys. Queries past the end of the sequence
    add nothing, because their q, dO, lse and delta are loaded as zeros. The rows of dK and dV for
    keys past the end are meaningless, and the caller does not store them.

    Args:
        dk, dv: running values of dK and dV. With FP16X3, both are scaled.
        peak: largest magnitude so far of each row of dS^T (see `tile_ops.scaled`).
        k, v: operands with the keys and values of the block (see `tile_ops.load_operand`).
        query, dout, lse, delta: addresses of the tensors of the head.
        first_key, first_query: index of the first key of the block and of the first query of the
            tile.

    Returns:
        the new dk, dv and peak.

    The module docstring and `dkdv_kernel` describe the other arguments.
    """
    q = load_operand(
        query,
        half_stride,
        first_query,
        n_queries,
        q_row,
        HEAD_DIM,
        BLOCK_Q,
        BLOCK_D,
        MASKED,
        FP16X3,
    )
    row_lse = load_rows(lse, first_query, n_queries, BLOCK_Q, MASKED) * LOG2E
    scores = product(k, transposed(q, FP16X3), FP16X3, PRECISION)
    do = load_operand(
        dout, half_stride, first_query, n_queries, dout_row, HEAD_DIM, BLOCK_Q, BLOCK_D, MASKED,
        FP16X3,
    )  # fmt: skip
    p = tl.exp2(scores * scale_log2e - row_lse[None, :])
    if MASKED and IS_CAUSAL:
        keys = first_key + tl.arange(0, BLOCK_K)
        queries = first_query + tl.arange(0, BLOCK_Q)
        p = tl.where(keys[:, None] <= queries[None, :], p, 0.0)
    if DV:
        large_p = p
        if FP16X3:
            large_p *= TOP_POWER
        dv = add_product(
            dv, as_operand(large_p, dout.dtype.element_ty, FP16X3), do, FP16X3, PRECISION
        )
    if DK:
        row_delta = load_rows(delta, first_query, n_queries, BLOCK_Q, MASKED)
        dp = product(v, transposed(do, FP16X3), FP16X3, PRECISION)
        if FP16X3:
            dp *= dp_unit
        ds = p * (dp - row_delta[None, :])
        dk, peak = _add_scaled(dk, peak, ds, q, query.dtype.element_ty, FP16X3, PRECISION)
    return dk, dv, peak


@triton.jit(
    do_not_specialize=["n_programs", "n_heads", "n_queries", "n_keys", "n_splits", "group"]
)  # fmt: skip
def dkdv_kernel(
    query, key, value, dout, peaks, lse, delta, dkey, dvalue,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    dout_batch, dout_head, dout_row,
    dk_split, dk_batch, dk_head, dk_row, dv_split, dv_batch, dv_head, dv_row,
    n_programs, n_heads, n_queries, n_keys, n_splits, queries_per_split, group, scale,
    scale_log2e,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    IS_CAUSAL: tl.constexpr, FP16X3: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Compute the gradients dK and dV of a block of keys and values from one range of the queries.

    The queries may be split into several ranges (splits). A separate program then processes each
    split.

    Grid: (number of blocks of keys * batch * heads * splits,).

    Args:
        query, dout: queries and gradient of the attention output, (batch, heads, n_queries,
            HEAD_DIM).
        key, value: (batch, heads, n_keys, HEAD_DIM).
        peaks: largest magnitude of each head of query, key, value and dout (see
            `tile_ops.peak_of`); read only with FP16X3.
        lse: natural-log log-sum-exp of the scaled scores, float32 (batch, heads, n_queries),
            contiguous.
        delta: result of `delta_kernel`, float32 (batch, heads, n_queries), contiguous.
        dkey, dvalue: outputs, (splits, batch, heads, n_keys, HEAD_DIM): gradients from the queries
            of each split. They have the dtype of the inputs, or float32 if there are several
            splits.
        n_splits: number of splits of the queries.
        queries_per_split: number of queries in each split except the last, a multiple of BLOCK_Q.
        group: number of heads that are processed together, so that their queries and dout stay in
            the L2 cache (see `tile_ops.schedule`).
        scale: scale of the scores.
        scale_log2e: scale times log2(e).
        BLOCK_Q: number of queries per tile of the inner loop.
        BLOCK_K: number of keys per block.
        FP16X3: whether the inputs are float32 tensors that are split into float16 halves. Then
            query, key, value and dout are contiguous tensors with an additional first dimension of
            size 2 (high half and low half).
        STAGES: number of stages of the software pipeline that loads queries and dout.
        DK: whether to compute dK.
        DV: whether to compute dV.

    `forward_kernel` describes the other arguments.
    """
    block, head, split = schedule(
        tl.program_id(0), tl.cdiv(n_keys, BLOCK_K), n_programs, n_splits, queries_per_split, group,
        BLOCK_K, IS_CAUSAL, True,
    )  # fmt: skip
    first_key = block * BLOCK_K
    first_query = split * queries_per_split
    last_query = tl.minimum(n_queries, first_query + queries_per_split)
    full_end = last_query // BLOCK_Q * BLOCK_Q
    full_start = first_query
    if IS_CAUSAL:
        # Queries before first_query see no key of the block. Queries from full_start on see all
        # keys of the block and need no mask.
        first_query = tl.maximum(first_query, first_key // BLOCK_Q * BLOCK_Q)
        full_start = tl.cdiv(first_key + BLOCK_K - 1, BLOCK_Q) * BLOCK_Q
        full_start = tl.maximum(tl.minimum(full_start, full_end), first_query)
    # Tiles that need a mask: the full tiles on the diagonal, and the incomplete tile at the end,
    # unless its queries see no key of the block.
    n_diagonal = (full_start - first_query) // BLOCK_Q
    n_masked = n_diagonal + tl.where((full_end < last_query) & (first_query <= full_end), 1, 0)

    s_unit, dp_unit, _, dk_unit, dv_unit = _units(peaks, head, n_programs, FP16X3)
    scale_log2e *= s_unit
    query = head_base(query, head, n_heads, q_batch, q_head)
    dout = head_base(dout, head, n_heads, dout_batch, dout_head)
    key = head_base(key, head, n_heads, k_batch, k_head)
    value = head_base(value, head, n_heads, v_batch, v_head)
    lse += head.to(tl.int64) * n_queries
    delta += head.to(tl.int64) * n_queries
    half_stride = tl.cast(n_programs, tl.int64) * n_keys * HEAD_DIM
    k = load_operand(
        key, half_stride, first_key, n_keys, k_row, HEAD_DIM, BLOCK_K, BLOCK_D, True, FP16X3
    )
    v = load_operand(
        value, half_stride, first_key, n_keys, v_row, HEAD_DIM, BLOCK_K, BLOCK_D, True, FP16X3
    )
    half_stride = tl.cast(n_programs, tl.int64) * n_queries * HEAD_DIM
    dk = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    peak = tl.full((BLOCK_K,), SMALLEST, tl.float32)

    for masked in tl.range(0, n_masked, num_stages=STAGES):
        start = tl.where(masked < n_diagonal, first_query + masked * BLOCK_Q, full_end)
        dk, dv, peak = _add_queries(
            dk, dv, peak, k, v, query, dout, lse, delta, first_key, start, n_queries, half_stride,
            q_row, dout_row, scale_log2e, dp_unit, HEAD_DIM, BLOCK_Q, BLOCK_K, BLOCK_D, IS_CAUSAL,
            True, FP16X3, PRECISION, DK, DV,
        )  # fmt: skip
    for start in tl.range(full_start, full_end, BLOCK_Q, num_stages=STAGES):
        dk, dv, peak = _add_queries(
            dk, dv, peak, k, v, query, dout, lse, delta, first_key, start, n_queries, half_stride,
            q_row, dout_row, scale_log2e, dp_unit, HEAD_DIM, BLOCK_Q, BLOCK_K, BLOCK_D, IS_CAUSAL,
            False, FP16X3, PRECISION, DK, DV,
        )  # fmt: skip

    split = split.to(tl.int64)
    dkey = head_base(dkey + split * dk_split, head, n_heads, dk_batch, dk_head)
    dvalue = head_base(dvalue + split * dv_split, head, n_heads, dv_batch, dv_head)
    if DK:
        if FP16X3:
            dk = unscaled(dk, peak)
        dk *= dk_unit * scale
        store_tile(dkey, first_key, n_keys, dk_row, dk, HEAD_DIM, BLOCK_K, BLOCK_D)
    if DV:
        if FP16X3:
            dv *= dv_unit
        store_tile(dvalue, first_key, n_keys, dv_row, dv, HEAD_DIM, BLOCK_K, BLOCK_D)


@triton.jit
def _add_keys(
    dq, peak, q, do, key, value, row_lse, row_delta, first_query, first_key, n_keys, half_stride,
    k_row, v_row, scale_log2e, dp_unit,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    IS_CAUSAL: tl.constexpr, MASKED: tl.constexpr, FP16X3: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the contribution of one tile of keys to dQ (algorithm 2, lines 11 to 15).

    The running value of dQ belongs to one block of queries.

    Args:
        dq: running value of dQ. With FP16X3, it is scaled.
        peak: largest magnitude so far of each row of dS (see `tile_ops.scaled`).
        q, do: operands with the queries and the output gradients of the block (see
            `tile_ops.load_operand`).
        key, value: addresses of the keys and values of the head.
        row_lse: log-sum-exp of each query, in base 2.
        row_delta: result of `delta_kernel` for each query.
        first_query, first_key: index of the first query of the block and of the first key of the
            tile.

    Returns:
        the new dq and peak.

    The module docstring and `dq_kernel` describe the other arguments.
    """
    k = load_operand(
        key, half_stride, first_key, n_keys, k_row, HEAD_DIM, BLOCK_K, BLOCK_D, MASKED, FP16X3
    )
    v = load_operand(
        value, half_stride, first_key, n_keys, v_row, HEAD_DIM, BLOCK_K, BLOCK_D, MASKED, FP16X3
    )
    scores = product(q, transposed(k, FP16X3), FP16X3, PRECISION)
    p = tl.exp2(scores * scale_log2e - row_lse[:, None])
    if MASKED:
        # Keys past the end must also be hidden. Their scores are 0, so P would be exp2(-lse). This
        # may be inf, and inf * 0 would be NaN.
        keys = first_key + tl.arange(0, BLOCK_K)
        visible = (keys < n_keys)[None, :]
        if IS_CAUSAL:
            queries = first_query + tl.arange(0, BLOCK_Q)
            visible = visible & (keys[None, :] <= queries[:, None])
        p = tl.where(visible, p, 0.0)
    dp = product(do, transposed(v, FP16X3), FP16X3, PRECISION)
    if FP16X3:
        dp *= dp_unit
    ds = p * (dp - row_delta[:, None])
    return _add_scaled(dq, peak, ds, k, key.dtype.element_ty, FP16X3, PRECISION)


@triton.jit(
    do_not_specialize=["n_programs", "n_heads", "n_queries", "n_keys", "n_splits", "group"]
)  # fmt: skip
def dq_kernel(
    query, key, value, dout, peaks, lse, delta, dquery,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    dout_batch, dout_head, dout_row, dq_split, dq_batch, dq_head, dq_row,
    n_programs, n_heads, n_queries, n_keys, n_splits, keys_per_split, group, scale, scale_log2e,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    IS_CAUSAL: tl.constexpr, FP16X3: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradient dQ of a block of queries from one range of the keys.

    The keys may be split into several ranges (splits). A separate program then processes each
    split.

    Grid: (number of blocks of queries * batch * heads * splits,).

    Args:
        dquery: output, (splits, batch, heads, n_queries, HEAD_DIM): gradient from the keys of each
            split. It has the dtype of the inputs, or float32 if there are several splits.
        n_splits: number of splits of the keys.
        keys_per_split: number of keys in each split except the last, a multiple of BLOCK_K.
        group: number of heads that are processed together, so that their keys and values stay in
            the L2 cache (see `tile_ops.schedule`).
        BLOCK_Q: number of queries per block.
        BLOCK_K: number of keys per tile of the inner loop.
        STAGES: number of stages of the software pipeline that loads keys and values.

    `dkdv_kernel` describes the other arguments.
    """
    block, head, split = schedule(
        tl.program_id(0), tl.cdiv(n_queries, BLOCK_Q), n_programs, n_splits, keys_per_split, group,
        BLOCK_Q, IS_CAUSAL, False,
    )  # fmt: skip
    first_query = block * BLOCK_Q
    first_key = split * keys_per_split
    last_key = tl.minimum(n_keys, first_key + keys_per_split)
    full_keys = n_keys  # number of keys that every query of the block sees
    if IS_CAUSAL:
        last_key = tl.minimum(last_key, first_query + BLOCK_Q)
        full_keys = tl.minimum(full_keys, first_query + 1)
    full_end = tl.minimum(last_key, full_keys // BLOCK_K * BLOCK_K)
    full_end = tl.maximum(full_end, first_key)

    s_unit, dp_unit, dq_unit, _, _ = _units(peaks, head, n_programs, FP16X3)
    scale_log2e *= s_unit
    query = head_base(query, head, n_heads, q_batch, q_head)
    dout = head_base(dout, head, n_heads, dout_batch, dout_head)
    key = head_base(key, head, n_heads, k_batch, k_head)
    value = head_base(value, head, n_heads, v_batch, v_head)
    lse += head.to(tl.int64) * n_queries
    delta += head.to(tl.int64) * n_queries
    half_stride = tl.cast(n_programs, tl.int64) * n_queries * HEAD_DIM
    q = load_operand(
        query, half_stride, first_query, n_queries, q_row, HEAD_DIM, BLOCK_Q, BLOCK_D, True, FP16X3
    )
    do = load_operand(
        dout,
        half_stride,
        first_query,
        n_queries,
        dout_row,
        HEAD_DIM,
        BLOCK_Q,
        BLOCK_D,
        True,
        FP16X3,
    )
    half_stride = tl.cast(n_programs, tl.int64) * n_keys * HEAD_DIM
    row_lse = load_rows(lse, first_query, n_queries, BLOCK_Q, True) * LOG2E
    row_delta = load_rows(delta, first_query, n_queries, BLOCK_Q, True)
    dq = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    peak = tl.full((BLOCK_Q,), SMALLEST, tl.float32)

    for start in tl.range(first_key, full_end, BLOCK_K, num_stages=STAGES):
        dq, peak = _add_keys(
            dq, peak, q, do, key, value, row_lse, row_delta, first_query, start, n_keys,
            half_stride, k_row, v_row, scale_log2e, dp_unit, HEAD_DIM, BLOCK_Q, BLOCK_K, BLOCK_D,
            IS_CAUSAL, False, FP16X3, PRECISION,
        )  # fmt: skip
    for start in tl.range(full_end, last_key, BLOCK_K, num_stages=STAGES):
        dq, peak = _add_keys(
            dq, peak, q, do, key, value, row_lse, row_delta, first_query, start, n_keys,
            half_stride, k_row, v_row, scale_log2e, dp_unit, HEAD_DIM, BLOCK_Q, BLOCK_K, BLOCK_D,
            IS_CAUSAL, True, FP16X3, PRECISION,
        )  # fmt: skip

    dquery = head_base(dquery + split.to(tl.int64) * dq_split, head, n_heads, dq_batch, dq_head)
    if FP16X3:
        dq = unscaled(dq, peak)
    dq *= dq_unit * scale
    store_tile(dquery, first_query, n_queries, dq_row, dq, HEAD_DIM, BLOCK_Q, BLOCK_D)
