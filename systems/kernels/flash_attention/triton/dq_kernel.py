"""The kernel that computes the gradient of queries (see `backward_ops`)."""

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
    seen_keys,
    sequence_base,
    sequence_rows,
    within_bounds,
)
from systems.kernels.flash_attention.triton.tile_ops import (
    SMALLEST,
    load_operand,
    load_rows,
    product,
    schedule,
    store_tile,
    transposed,
    unscaled,
)


@triton.jit
def _add_keys(
    dq, peak, q, do, key, value, row_lse, row_delta, first_query, first_key, n_keys, key_half,
    value_half, k_row, v_row, lower, upper, scale_log2e, cap_log2e, dp_unit,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr, MASKED: tl.constexpr, FP16X3: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to dQ of a block of queries.

    `dq` is the running value, scaled with FP16X3. `peak` has the largest magnitude so far of each
    row of dS (see `tile_ops.scaled`). `q` and `do` are operands of the block (see
    `tile_ops.load_operand`), and `key` and `value` are addresses of the first row of the sequence.
    `row_lse` is in base 2, and `row_delta` is the result of `delta_kernel`. Returns the new dq and
    peak.

    The module `backward_ops` and `dq_kernel` describe the other arguments.
    """
    k = load_operand(
        key, key_half, first_key, n_keys, k_row, HEAD_DIM, BLOCK_K, BLOCK_D, MASKED, FP16X3
    )
    v = load_operand(
        value, value_half, first_key, n_keys, v_row, VALUE_DIM, BLOCK_K, BLOCK_V, MASKED, FP16X3
    )
    scores = product(q, transposed(k, FP16X3), FP16X3, PRECISION)
    if SOFTCAP:
        scores, slope = capped(
            scores, scale_log2e, cap_log2e, SOFTCAP, key.dtype.element_ty, FP16X3
        )
        scale_log2e = 1.0
    p = tl.exp2(scores * scale_log2e - row_lse[:, None])
    dp = product(do, transposed(v, FP16X3), FP16X3, PRECISION)
    if FP16X3:
        dp *= dp_unit
    ds = p * (dp - row_delta[:, None])
    if SOFTCAP:
        ds *= slope
    if MASKED:
        # P may be infinite for keys past the end, because their scores are 0 and P is exp2(-lse).
        # dP or the slope may be NaN because of a hidden key or value. 0 times these is NaN, so dS
        # is masked and not P.
        keys = first_key + tl.arange(0, BLOCK_K)
        queries = first_query + tl.arange(0, BLOCK_Q)
        visible = within_bounds(
            (keys < n_keys)[None, :], queries[:, None], keys[None, :], lower, upper, HAS_LEFT,
            HAS_RIGHT,
        )  # fmt: skip
        ds = tl.where(visible, ds, 0.0)
    return add_scaled(dq, peak, ds, k, 1.0, key.dtype.element_ty, FP16X3, PRECISION)


@triton.jit(do_not_specialize=SIZES)
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
    """Compute the gradient dQ of a block of queries from one range (split) of the keys.

    Grid: (number of blocks of queries * batch * heads * splits,).

    Args:
        dquery: output, (splits, batch, heads, total_queries, HEAD_DIM): gradient from the keys of
            each split. Its dtype is that of the inputs, or float32 with several splits.

    `dkdv_kernel` describes dout, peaks, lse and delta, and `forward_kernel` the others.
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
    s_unit, dp_unit, dq_unit, _, _ = units(peaks, head, kv_head, n_programs, FP16X3)
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
