"""The kernel that computes the gradients of keys and values (see `backward_ops`)."""

# Kernel arguments have Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from systems.kernels.flash_attention.triton.backward_ops import (
    SIZES,
    add_scaled,
    capped,
    units,
)
from systems.kernels.flash_attention.triton.mask_ops import (
    LOG2E,
    mask_bounds,
    masked_tile,
    n_matrices,
    rows_before,
    seen_by_queries,
    sequence_base,
    sequence_rows,
    within_bounds,
)
from systems.kernels.flash_attention.triton.tile_ops import (
    SMALLEST,
    TOP_POWER,
    add_product,
    as_operand,
    load_operand,
    load_rows,
    product,
    schedule,
    store_tile,
    transposed,
    unscaled,
)


@triton.jit
def _member(step, first, length, Q_PER_KV: tl.constexpr):
    """Return the member of a group of heads to which a step of a loop belongs, and its row.

    The loop goes over `length` rows of each of Q_PER_KV heads, from `first` on.
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
    """Add one tile of queries to dK and dV of a block of keys, or to one of them.

    Queries past the end of the sequence add nothing, because their q, dO, lse and delta are loaded
    as zeros. The rows of dK and dV for keys past the end are meaningless, and the caller does not
    store them.

    dk and dv are the running values, scaled with FP16X3. `peak` has the largest magnitude so far of
    each row of dS^T (see `tile_ops.scaled`). k and v are operands of the block (see
    `tile_ops.load_operand`). `query`, `dout`, `lse` and `delta` are addresses of the first row of
    the sequence in the first head of the group of heads that have these keys. `head` is the index
    of this first head, and `member` that of the head of the tile in the group. `s_unit` and
    `dp_unit` are factors for the first head (see `units`). Returns the new dk, dv and peak.

    The module `backward_ops` and `dkdv_kernel` describe the other arguments.
    """
    dk_unit, dv_unit = 1.0, 1.0
    if Q_PER_KV > 1:
        offset = member.to(tl.int64)
        query += offset * q_head
        dout += offset * dout_head
        lse += offset * total_queries
        delta += offset * total_queries
        s_unit, dp_unit, _, dk_unit, dv_unit = units(
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
        scores, slope = capped(
            scores, scale_log2e, cap_log2e, SOFTCAP, query.dtype.element_ty, FP16X3
        )
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
        if FP16X3 and MASKED and (HAS_LEFT or HAS_RIGHT):
            # dP, delta or the slope may be NaN because of a value that is hidden from the other. In
            # 16 bits, the kernel would need more registers than there are for this.
            ds = tl.where(visible, ds, 0.0)
        dk, peak = add_scaled(dk, peak, ds, q, dk_unit, query.dtype.element_ty, FP16X3, PRECISION)
    return dk, dv, peak


@triton.jit(do_not_specialize=SIZES)
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

    A program processes its range (split) of all heads of queries that have the head of keys.
    BLOCK_Q is the tile of the inner loop, whose loads of queries and dout are pipelined in STAGES.
    DK and DV tell what to compute. `forward_kernel` describes the arguments that are not listed.

    Grid: (number of blocks of keys * batch * heads of keys * splits,).

    Args:
        dout: gradient of the output, (batch, heads, total_queries, VALUE_DIM), split as query with
            FP16X3.
        peaks: as in `forward_kernel`, and also of dout.
        lse, delta: float32 (batch, heads, total_queries), contiguous: natural-log log-sum-exp of
            the scaled scores, and the result of `delta_kernel`.
        dkey, dvalue: outputs, (splits, *shape of key) and (splits, *shape of value): gradients from
            the queries of each split. Their dtype is that of the inputs, or float32 with several
            splits.
        queries_per_split: number of queries in each split except the last, a multiple of BLOCK_Q.
        group: heads of keys that are processed together, so that their queries and dout stay in the
            L2 cache (see `tile_ops.schedule`).
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
    s_unit, dp_unit, _, dk_unit, dv_unit = units(peaks, head, kv_head, n_programs, FP16X3)
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
