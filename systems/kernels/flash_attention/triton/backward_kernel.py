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

At the end, dK and dQ are multiplied by the scale. With a softcap c, the scores are S' =
c tanh(S / c) instead of S, and dS is multiplied by 1 - (S' / c)^2.

With grouped heads, several heads of queries have the same head of keys. A program of dkdv_kernel
then loops over the queries of all of them.

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

    *_half         distance from the high to the low float16 half of a tensor in memory, in
                   elements; used only with FP16X3
    lower, upper   bounds of the mask (see `mask_ops`)
    dp_unit        factor that undoes the scaling of the inputs in dP (see `_units`)
    scale_log2e    scale of the scores times log2(e); with FP16X3, also times the units of q and k
                   (see `tile_ops.unit`)
    cap_log2e      softcap times log2(e); read only with SOFTCAP
    MASKED         whether the tile needs a mask, because it is at a bound of the mask or incomplete
"""

# Kernel arguments have Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from systems.kernels.flash_attention.triton.mask_ops import (
    LOG2E,
    mask_bounds,
    masked_tile,
    n_matrices,
    rows_before,
    seen_by_queries,
    seen_keys,
    sequence_base,
    sequence_rows,
    tanh,
    within_bounds,
)
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
def _units(peaks, head, kv_head, n_programs, FP16X3: tl.constexpr):
    """Return five factors that undo the scaling of the inputs in S, dP, dQ, dK and dV.

    With FP16X3 (float32 inputs that are split into float16 halves), each head of q, k, v and dO is
    divided by a power of two, its unit. A matrix product must be multiplied by the units of its
    operands. The factor for dV also undoes the multiplication of the softmax P by 2^14 (TOP_POWER).
    Without FP16X3, all factors are 1.

    Args:
        head, kv_head: index of the head of q and dO, and of the head of k and v.
        peaks, n_programs: as in `tile_ops.peak_of`.
    """
    s, dp, dq, dk, dv = 1.0, 1.0, 1.0, 1.0, 1.0
    if FP16X3:
        q, k = unit(peaks, 0, head, n_programs), unit(peaks, 1, kv_head, n_programs)
        v, do = unit(peaks, 2, kv_head, n_programs), unit(peaks, 3, head, n_programs)
        s, dp, dq, dk, dv = q * k, v * do, k, q, do * TOP_INVERSE
    return s, dp, dq, dk, dv


@triton.jit
def _capped(scores, scale_log2e, cap_log2e, DTYPE: tl.constexpr, FP16X3: tl.constexpr):
    """Return the capped scores in base 2 and their derivative, for scores before scaling."""
    is_precise: tl.constexpr = tl.float32 == DTYPE or FP16X3
    ratio = tanh(scores * (scale_log2e / cap_log2e), is_precise)
    return cap_log2e * ratio, 1.0 - ratio * ratio


@triton.jit
def _add_scaled(
    total, peak, ds, other, factor,
    DTYPE: tl.constexpr, FP16X3: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return total + factor dS @ other in float32, and the new peaks of the rows of dS.

    With FP16X3, dS is converted to float16 halves. Its magnitudes have no known bound, so each row
    is first divided by a power of two (see `tile_ops.scaled`). The same row of the sum has the same
    scale. Without FP16X3, nothing is scaled, and `peak` is returned unchanged.

    Args:
        total: sum of the earlier products.
        peak: largest magnitude of each row of dS in the earlier calls.
        ds: float32 tile of dS.
        other: the second operand of the product (see `tile_ops.load_operand`).
        factor: see `tile_ops.add_product`.
        DTYPE: dtype to which ds is rounded without FP16X3.
    """
    if FP16X3:
        ds, peak, correction = scaled(ds, peak)
        total = total * correction[:, None]
    ds = as_operand(ds, DTYPE, FP16X3)
    return add_product(total, ds, other, factor, FP16X3, PRECISION), peak


@triton.jit
def _member(step, first, length, Q_PER_KV: tl.constexpr):
    """Return the member of a group of heads to which a step of a loop belongs, and its row.

    The loop begins at `first` and goes over `length` rows of each of Q_PER_KV heads. The row is
    between first and first + length.
    """
    if Q_PER_KV == 1:
        member = 0
        row = step
    else:
        member = (step - first) // length
        row = step - member * length
    return member, row


@triton.jit
def _add_queries(
    dk, dv, peak, k, v, query, dout, lse, delta, peaks, head, member, first_key, first_query,
    n_queries, total_queries, n_programs, kv_head, query_half, dout_half, q_head, q_row, dout_head,
    dout_row, lower, upper, scale_log2e, cap_log2e, s_unit, dp_unit,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, Q_PER_KV: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr, FP16X3: tl.constexpr,
    PRECISION: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Add the contribution of one tile of queries to dK and dV (algorithm 2, lines 11 to 16).

    The running values dK and dV belong to one block of keys. Queries past the end of the sequence
    add nothing, because their q, dO, lse and delta are loaded as zeros. The rows of dK and dV for
    keys past the end are meaningless, and the caller does not store them.

    Args:
        dk, dv: running values of dK and dV. With FP16X3, both are scaled.
        peak: largest magnitude so far of each row of dS^T (see `tile_ops.scaled`).
        k, v: operands with the keys and values of the block (see `tile_ops.load_operand`).
        query, dout, lse, delta: addresses of the first row of the sequence in the first head of the
            group of heads that have these keys.
        head, member: index of this first head, and of the head of the tile in the group.
        first_key, first_query: index of the first key of the block and of the first query of the
            tile.
        s_unit, dp_unit: factors for the first head (see `_units`).

    Returns:
        the new dk, dv and peak.

    The module docstring and `dkdv_kernel` describe the other arguments.
    """
    dk_unit, dv_unit = 1.0, 1.0
    if Q_PER_KV > 1:
        offset = member.to(tl.int64)
        query += offset * q_head
        dout += offset * dout_head
        lse += offset * total_queries
        delta += offset * total_queries
        s_unit, dp_unit, _, dk_unit, dv_unit = _units(
            peaks, head + member, kv_head, n_programs, FP16X3
        )
    scale_log2e *= s_unit
    q = load_operand(
        query, query_half, first_query, n_queries, q_row, HEAD_DIM, BLOCK_Q, BLOCK_D, MASKED,
        FP16X3,
    )  # fmt: skip
    row_lse = load_rows(lse, first_query, n_queries, BLOCK_Q, MASKED) * LOG2E
    scores = product(k, transposed(q, FP16X3), FP16X3, PRECISION)
    do = load_operand(
        dout, dout_half, first_query, n_queries, dout_row, VALUE_DIM, BLOCK_Q, BLOCK_V, MASKED,
        FP16X3,
    )  # fmt: skip
    if SOFTCAP:
        scores, slope = _capped(scores, scale_log2e, cap_log2e, query.dtype.element_ty, FP16X3)
        scale_log2e = 1.0
    p = tl.exp2(scores * scale_log2e - row_lse[None, :])
    if MASKED and (HAS_LEFT or HAS_RIGHT):
        keys = first_key + tl.arange(0, BLOCK_K)
        queries = first_query + tl.arange(0, BLOCK_Q)
        visible = within_bounds(
            True, queries[None, :], keys[:, None], lower, upper, HAS_LEFT, HAS_RIGHT
        )
        p = tl.where(visible, p, 0.0)
    if DV:
        large_p = p
        if FP16X3:
            large_p *= TOP_POWER
        large_p = as_operand(large_p, dout.dtype.element_ty, FP16X3)
        dv = add_product(dv, large_p, do, dv_unit, FP16X3, PRECISION)
    if DK:
        row_delta = load_rows(delta, first_query, n_queries, BLOCK_Q, MASKED)
        dp = product(v, transposed(do, FP16X3), FP16X3, PRECISION)
        if FP16X3:
            dp *= dp_unit
        ds = p * (dp - row_delta[None, :])
        if SOFTCAP:
            ds *= slope
        dk, peak = _add_scaled(dk, peak, ds, q, dk_unit, query.dtype.element_ty, FP16X3, PRECISION)
    return dk, dv, peak


@triton.jit(
    do_not_specialize=[
        "n_programs", "n_heads", "total_queries", "total_keys", "n_splits", "group", "left",
        "right",
    ]
)  # fmt: skip
def dkdv_kernel(
    query, key, value, dout, peaks, starts_q, starts_k, lse, delta, dkey, dvalue,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    dout_batch, dout_head, dout_row,
    dk_split, dk_batch, dk_head, dk_row, dv_split, dv_batch, dv_head, dv_row,
    n_programs, n_heads, total_queries, total_keys, n_splits, queries_per_split, group, left, right,
    scale, scale_log2e, cap_log2e,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, Q_PER_KV: tl.constexpr, PACKED: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, IS_CAUSAL: tl.constexpr,
    LOWER_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, FP16X3: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Compute the gradients dK and dV of a block of keys and values from one range of the queries.

    The queries may be split into several ranges (splits). A separate program then processes each
    split, and it processes this range of all heads of queries that have the head of keys.

    Grid: (number of blocks of keys * batch * heads of keys * splits,).

    Args:
        query: (batch, heads, total_queries, HEAD_DIM).
        dout: gradient of the attention output, (batch, heads, total_queries, VALUE_DIM).
        key: (batch, heads / Q_PER_KV, total_keys, HEAD_DIM).
        value: (batch, heads / Q_PER_KV, total_keys, VALUE_DIM).
        peaks: largest magnitude of each head of query, key, value and dout (see
            `tile_ops.peak_of`); read only with FP16X3.
        lse: natural-log log-sum-exp of the scaled scores, float32 (batch, heads, total_queries),
            contiguous.
        delta: result of `delta_kernel`, float32 (batch, heads, total_queries), contiguous.
        dkey, dvalue: outputs, (splits, *shape of key) and (splits, *shape of value): gradients from
            the queries of each split. They have the dtype of the inputs, or float32 if there are
            several splits.
        n_splits: number of splits of the queries.
        queries_per_split: number of queries in each split except the last, a multiple of BLOCK_Q.
        group: number of heads of keys that are processed together, so that their queries and dout
            stay in the L2 cache (see `tile_ops.schedule`).
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
    n_blocks = tl.cdiv(total_keys, BLOCK_K)
    n_kv_heads = n_heads // Q_PER_KV
    if PACKED:
        n_blocks = tl.num_programs(0) // (n_programs // Q_PER_KV * n_splits)
    block, kv_head, split = schedule(
        tl.program_id(0), n_blocks, n_programs // Q_PER_KV, n_splits, queries_per_split, group,
        BLOCK_K, HAS_RIGHT, True,
    )  # fmt: skip
    start_q, n_queries = sequence_rows(starts_q, kv_head, n_kv_heads, total_queries, PACKED)
    start_k, n_keys = sequence_rows(starts_k, kv_head, n_kv_heads, total_keys, PACKED)
    first_key = block * BLOCK_K
    if PACKED and first_key >= n_keys:
        return
    lower, upper = mask_bounds(left, right, n_queries, n_keys, IS_CAUSAL, LOWER_RIGHT)
    first_query = split * queries_per_split
    last_query = tl.minimum(n_queries, first_query + queries_per_split)
    first_query, full_start, full_end, last_query = seen_by_queries(
        first_key, first_query, last_query, lower, upper, BLOCK_Q, BLOCK_K, HAS_LEFT, HAS_RIGHT
    )
    masked_from = first_query + (full_end - full_start)

    key = sequence_base(key, kv_head, n_kv_heads, start_k, k_batch, k_head, k_row)
    value = sequence_base(value, kv_head, n_kv_heads, start_k, v_batch, v_head, v_row)
    matrices = tl.cast(n_matrices(n_programs, n_heads, PACKED), tl.int64)
    query_half = matrices * total_queries * HEAD_DIM
    dout_half = matrices * total_queries * VALUE_DIM
    key_half = matrices // Q_PER_KV * total_keys * HEAD_DIM
    value_half = matrices // Q_PER_KV * total_keys * VALUE_DIM
    k = load_operand(
        key, key_half, first_key, n_keys, k_row, HEAD_DIM, BLOCK_K, BLOCK_D, True, FP16X3
    )
    v = load_operand(
        value, value_half, first_key, n_keys, v_row, VALUE_DIM, BLOCK_K, BLOCK_V, True, FP16X3
    )
    dk = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_K, BLOCK_V), tl.float32)
    peak = tl.full((BLOCK_K,), SMALLEST, tl.float32)

    head = kv_head * Q_PER_KV  # the first of the heads of queries that have this head of keys
    query = sequence_base(query, head, n_heads, start_q, q_batch, q_head, q_row)
    dout = sequence_base(dout, head, n_heads, start_q, dout_batch, dout_head, dout_row)
    rows = rows_before(head, n_heads, total_queries, start_q, PACKED)
    lse += rows
    delta += rows
    s_unit, dp_unit, _, dk_unit, dv_unit = _units(peaks, head, kv_head, n_programs, FP16X3)
    # Each loop goes over the tiles of all these heads. Two nested loops would need more registers.
    n_masked = tl.cdiv(tl.maximum(last_query - masked_from, 0), BLOCK_Q) * BLOCK_Q
    masked_to = last_query if Q_PER_KV == 1 else masked_from + n_masked * Q_PER_KV
    for step in tl.range(masked_from, masked_to, BLOCK_Q, num_stages=STAGES):
        member, position = _member(step, masked_from, n_masked, Q_PER_KV)
        start = masked_tile(position, full_start, full_end, HAS_RIGHT)
        dk, dv, peak = _add_queries(
            dk, dv, peak, k, v, query, dout, lse, delta, peaks, head, member, first_key, start,
            n_queries, total_queries, n_programs, kv_head, query_half, dout_half, q_head, q_row,
            dout_head, dout_row, lower, upper, scale_log2e, cap_log2e, s_unit, dp_unit, HEAD_DIM,
            VALUE_DIM, BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_V, Q_PER_KV, HAS_LEFT, HAS_RIGHT, SOFTCAP,
            True, FP16X3, PRECISION, DK, DV,
        )  # fmt: skip
    n_full = full_end - full_start
    full_to = full_end if Q_PER_KV == 1 else full_start + n_full * Q_PER_KV
    for step in tl.range(full_start, full_to, BLOCK_Q, num_stages=STAGES):
        member, start = _member(step, full_start, n_full, Q_PER_KV)
        dk, dv, peak = _add_queries(
            dk, dv, peak, k, v, query, dout, lse, delta, peaks, head, member, first_key, start,
            n_queries, total_queries, n_programs, kv_head, query_half, dout_half, q_head, q_row,
            dout_head, dout_row, lower, upper, scale_log2e, cap_log2e, s_unit, dp_unit, HEAD_DIM,
            VALUE_DIM, BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_V, Q_PER_KV, HAS_LEFT, HAS_RIGHT, SOFTCAP,
            False, FP16X3, PRECISION, DK, DV,
        )  # fmt: skip

    split = split.to(tl.int64)
    if Q_PER_KV == 1:
        scale *= dk_unit
        dv *= dv_unit
    if DK:
        if FP16X3:
            dk = unscaled(dk, peak)
        dkey += split * dk_split
        dkey = sequence_base(dkey, kv_head, n_kv_heads, start_k, dk_batch, dk_head, dk_row)
        store_tile(dkey, first_key, n_keys, dk_row, dk * scale, HEAD_DIM, BLOCK_K, BLOCK_D)
    if DV:
        dvalue += split * dv_split
        dvalue = sequence_base(dvalue, kv_head, n_kv_heads, start_k, dv_batch, dv_head, dv_row)
        store_tile(dvalue, first_key, n_keys, dv_row, dv, VALUE_DIM, BLOCK_K, BLOCK_V)


@triton.jit
def _add_keys(
    dq, peak, q, do, key, value, row_lse, row_delta, first_query, first_key, n_keys, key_half,
    value_half, k_row, v_row, lower, upper, scale_log2e, cap_log2e, dp_unit,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr, MASKED: tl.constexpr, FP16X3: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the contribution of one tile of keys to dQ (algorithm 2, lines 11 to 15).

    The running value of dQ belongs to one block of queries.

    Args:
        dq: running value of dQ. With FP16X3, it is scaled.
        peak: largest magnitude so far of each row of dS (see `tile_ops.scaled`).
        q, do: operands with the queries and the output gradients of the block (see
            `tile_ops.load_operand`).
        key, value: addresses of the first row of the sequence in the tensors.
        row_lse: log-sum-exp of each query, in base 2.
        row_delta: result of `delta_kernel` for each query.
        first_query, first_key: index of the first query of the block and of the first key of the
            tile.

    Returns:
        the new dq and peak.

    The module docstring and `dq_kernel` describe the other arguments.
    """
    k = load_operand(
        key, key_half, first_key, n_keys, k_row, HEAD_DIM, BLOCK_K, BLOCK_D, MASKED, FP16X3
    )
    v = load_operand(
        value, value_half, first_key, n_keys, v_row, VALUE_DIM, BLOCK_K, BLOCK_V, MASKED, FP16X3
    )
    scores = product(q, transposed(k, FP16X3), FP16X3, PRECISION)
    if SOFTCAP:
        scores, slope = _capped(scores, scale_log2e, cap_log2e, key.dtype.element_ty, FP16X3)
        scale_log2e = 1.0
    p = tl.exp2(scores * scale_log2e - row_lse[:, None])
    if MASKED:
        # Keys past the end must also be hidden. Their scores are 0, so P would be exp2(-lse). This
        # may be inf, and inf * 0 would be NaN.
        keys = first_key + tl.arange(0, BLOCK_K)
        queries = first_query + tl.arange(0, BLOCK_Q)
        visible = within_bounds(
            (keys < n_keys)[None, :], queries[:, None], keys[None, :], lower, upper, HAS_LEFT,
            HAS_RIGHT,
        )  # fmt: skip
        p = tl.where(visible, p, 0.0)
    dp = product(do, transposed(v, FP16X3), FP16X3, PRECISION)
    if FP16X3:
        dp *= dp_unit
    ds = p * (dp - row_delta[:, None])
    if SOFTCAP:
        ds *= slope
    return _add_scaled(dq, peak, ds, k, 1.0, key.dtype.element_ty, FP16X3, PRECISION)


@triton.jit(
    do_not_specialize=[
        "n_programs", "n_heads", "total_queries", "total_keys", "n_splits", "group", "left",
        "right",
    ]
)  # fmt: skip
def dq_kernel(
    query, key, value, dout, peaks, starts_q, starts_k, lse, delta, dquery,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    dout_batch, dout_head, dout_row, dq_split, dq_batch, dq_head, dq_row,
    n_programs, n_heads, total_queries, total_keys, n_splits, keys_per_split, group, left, right,
    scale, scale_log2e, cap_log2e,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, Q_PER_KV: tl.constexpr, PACKED: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, IS_CAUSAL: tl.constexpr,
    LOWER_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, FP16X3: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the gradient dQ of a block of queries from one range of the keys.

    The keys may be split into several ranges (splits). A separate program then processes each
    split.

    Grid: (number of blocks of queries * batch * heads * splits,).

    Args:
        dquery: output, (splits, batch, heads, total_queries, HEAD_DIM): gradient from the keys of
            each split. It has the dtype of the inputs, or float32 if there are several splits.
        n_splits: number of splits of the keys.
        keys_per_split: number of keys in each split except the last, a multiple of BLOCK_K.
        group: number of heads that are processed together, so that their keys and values stay in
            the L2 cache (see `tile_ops.schedule`).
        BLOCK_Q: number of queries per block.
        BLOCK_K: number of keys per tile of the inner loop.
        STAGES: number of stages of the software pipeline that loads keys and values.

    `dkdv_kernel` describes the other arguments.
    """
    n_blocks = tl.cdiv(total_queries, BLOCK_Q)
    if PACKED:
        n_blocks = tl.num_programs(0) // (n_programs * n_splits)
    block, head, split = schedule(
        tl.program_id(0), n_blocks, n_programs, n_splits, keys_per_split, group, BLOCK_Q, HAS_RIGHT,
        False,
    )  # fmt: skip
    start_q, n_queries = sequence_rows(starts_q, head, n_heads, total_queries, PACKED)
    start_k, n_keys = sequence_rows(starts_k, head, n_heads, total_keys, PACKED)
    first_query = block * BLOCK_Q
    if PACKED and first_query >= n_queries:
        return
    lower, upper = mask_bounds(left, right, n_queries, n_keys, IS_CAUSAL, LOWER_RIGHT)
    first_key = split * keys_per_split
    last_key = tl.minimum(n_keys, first_key + keys_per_split)
    first_key, full_start, full_end, last_key = seen_keys(
        first_query, first_key, last_key, n_keys, lower, upper, BLOCK_Q, BLOCK_K, HAS_LEFT,
        HAS_RIGHT,
    )  # fmt: skip

    kv_head, n_kv_heads = head // Q_PER_KV, n_heads // Q_PER_KV
    s_unit, dp_unit, dq_unit, _, _ = _units(peaks, head, kv_head, n_programs, FP16X3)
    scale_log2e *= s_unit
    query = sequence_base(query, head, n_heads, start_q, q_batch, q_head, q_row)
    dout = sequence_base(dout, head, n_heads, start_q, dout_batch, dout_head, dout_row)
    key = sequence_base(key, kv_head, n_kv_heads, start_k, k_batch, k_head, k_row)
    value = sequence_base(value, kv_head, n_kv_heads, start_k, v_batch, v_head, v_row)
    rows = rows_before(head, n_heads, total_queries, start_q, PACKED)
    matrices = tl.cast(n_matrices(n_programs, n_heads, PACKED), tl.int64)
    query_half = matrices * total_queries * HEAD_DIM
    dout_half = matrices * total_queries * VALUE_DIM
    key_half = matrices // Q_PER_KV * total_keys * HEAD_DIM
    value_half = matrices // Q_PER_KV * total_keys * VALUE_DIM
    q = load_operand(
        query, query_half, first_query, n_queries, q_row, HEAD_DIM, BLOCK_Q, BLOCK_D, True, FP16X3
    )
    do = load_operand(
        dout, dout_half, first_query, n_queries, dout_row, VALUE_DIM, BLOCK_Q, BLOCK_V, True, FP16X3
    )
    row_lse = load_rows(lse + rows, first_query, n_queries, BLOCK_Q, True) * LOG2E
    row_delta = load_rows(delta + rows, first_query, n_queries, BLOCK_Q, True)
    dq = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    peak = tl.full((BLOCK_Q,), SMALLEST, tl.float32)

    for start in tl.range(full_start, full_end, BLOCK_K, num_stages=STAGES):
        dq, peak = _add_keys(
            dq, peak, q, do, key, value, row_lse, row_delta, first_query, start, n_keys, key_half,
            value_half, k_row, v_row, lower, upper, scale_log2e, cap_log2e, dp_unit, HEAD_DIM,
            VALUE_DIM, BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_V, HAS_LEFT, HAS_RIGHT, SOFTCAP, False,
            FP16X3, PRECISION,
        )  # fmt: skip
    masked_from = first_key + (full_end - full_start)
    for position in tl.range(masked_from, last_key, BLOCK_K, num_stages=STAGES):
        start = masked_tile(position, full_start, full_end, HAS_LEFT)
        dq, peak = _add_keys(
            dq, peak, q, do, key, value, row_lse, row_delta, first_query, start, n_keys, key_half,
            value_half, k_row, v_row, lower, upper, scale_log2e, cap_log2e, dp_unit, HEAD_DIM,
            VALUE_DIM, BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_V, HAS_LEFT, HAS_RIGHT, SOFTCAP, True,
            FP16X3, PRECISION,
        )  # fmt: skip

    dquery += split.to(tl.int64) * dq_split
    dquery = sequence_base(dquery, head, n_heads, start_q, dq_batch, dq_head, dq_row)
    if FP16X3:
        dq = unscaled(dq, peak)
    dq *= dq_unit * scale
    store_tile(dquery, first_query, n_queries, dq_row, dq, HEAD_DIM, BLOCK_Q, BLOCK_D)
