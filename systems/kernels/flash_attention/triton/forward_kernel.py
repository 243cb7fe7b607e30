"""Forward pass of FlashAttention-2 in Triton (Dao 2023, algorithm 1), optionally split over keys.

A program processes BLOCK_Q queries of one head and loops over tiles of BLOCK_K keys. For each query
it has a running maximum m of the scores, a running sum l and a running output O. A tile of keys
with the scores S changes m, l and O to m', l' and O':

    S = q k^T    m' = max(m, scale log2(e) max_j S)    P = exp2(scale log2(e) S - m')
    l' = l exp2(m - m') + sum_j P                      O' = O exp2(m - m') + P v

The exponentials and m are in base 2, because GPUs have an instruction for exp2. After the loop, the
output is O / l, and the natural-log log-sum-exp is (m + log2 l) ln 2.

The first loop has no mask. It processes the tiles of keys that every query of the block sees. The
second loop has a mask. It processes the tiles at the bounds of the mask and the incomplete tile at
the end. Keys that no query of the block sees are not loaded.

With grouped heads (Ainslie et al. 2023, "GQA"), several heads of queries have the same head of keys
and values. A softcap c replaces each scaled score s by c tanh(s / c), before the mask.

If the keys are split into ranges (see `work_splits`), a program processes one range.
`combine_kernel` weights the partial outputs by their log-sum-exps (Flash-Decoding, Dao et al.
2023).
"""

# Kernel arguments have Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from systems.kernels.flash_attention.triton.mask_ops import (
    mask_bounds,
    masked_tile,
    n_matrices,
    rows_before,
    seen_keys,
    sequence_base,
    sequence_rows,
    tanh,
    within_bounds,
)
from systems.kernels.flash_attention.triton.tile_ops import (
    TOP_INVERSE,
    TOP_POWER,
    add_product,
    as_operand,
    load_operand,
    product,
    schedule,
    store_tile,
    transposed,
    unit,
)

LN2 = tl.constexpr(0.6931471805599453)
# Initial maximum of a row. If a row has no visible key in its first tile, its P must be 0. With a
# finite maximum, P is exp2(-inf - FLOOR) = 0; with -inf, it would be exp2(-inf + inf) = NaN.
FLOOR = tl.constexpr(-3.0e38)


@triton.jit
def _add_tile(
    accumulator, maximum, total, q, key, value, first_query, first_key, n_keys, key_half,
    value_half, key_row_stride, value_row_stride, lower, upper, scale_log2e, cap_log2e,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr, MASKED: tl.constexpr, FP16X3: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Update the running values of a block of queries with one tile of keys.

    The formulas are at the top of the module (algorithm 1 of FlashAttention-2, lines 7 to 10).

    `accumulator` is the running output O, which with FP16X3 is multiplied by 2^14 (TOP_POWER) and
    divided by the unit of the values (see `tile_ops.unit`). `maximum` is the running maximum m of
    the scaled scores times log2(e), and `total` is the running sum l. `q` is an operand (see
    `tile_ops.load_operand`). With FP16X3, `key_half` and `value_half` are the distances in elements
    from the high to the low float16 halves, and `scale_log2e` also contains the units of q and k. A
    tile is MASKED if it is at a bound of the mask or incomplete. Returns the new accumulator,
    maximum and total.

    `forward_kernel` describes the other arguments.
    """
    k = load_operand(
        key, key_half, first_key, n_keys, key_row_stride, HEAD_DIM, BLOCK_K, BLOCK_D, MASKED,
        FP16X3,
    )  # fmt: skip
    scores = product(q, transposed(k, FP16X3), FP16X3, PRECISION)
    if SOFTCAP:
        is_precise: tl.constexpr = value.dtype.element_ty == tl.float32 or FP16X3 or SOFTCAP == 2
        scores = cap_log2e * tanh(scores * (scale_log2e / cap_log2e), is_precise)
        scale_log2e = 1.0
    if MASKED:
        keys = first_key + tl.arange(0, BLOCK_K)
        queries = first_query + tl.arange(0, BLOCK_Q)
        visible = within_bounds(
            (keys < n_keys)[None, :], queries[:, None], keys[None, :], lower, upper, HAS_LEFT,
            HAS_RIGHT,
        )  # fmt: skip
        # Scale before masking: if the scale is zero, -inf * 0 would be NaN.
        scores = tl.where(visible, scores * scale_log2e, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        p = tl.exp2(scores - new_maximum[:, None])
    else:
        # The scale is not negative, so max(scale * s) = scale * max(s). So the maximum does not
        # need scaled scores. Scaling and subtraction are one fused multiply-add per score.
        new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale_log2e)
        p = tl.exp2(scores * scale_log2e - new_maximum[:, None])
    correction = tl.exp2(maximum - new_maximum)
    total = total * correction + tl.sum(p, 1)
    accumulator = accumulator * correction[:, None]
    v = load_operand(
        value, value_half, first_key, n_keys, value_row_stride, VALUE_DIM, BLOCK_K, BLOCK_V, MASKED,
        FP16X3,
    )  # fmt: skip
    if FP16X3:
        p *= TOP_POWER
    p = as_operand(p, value.dtype.element_ty, FP16X3)
    accumulator = add_product(accumulator, p, v, 1.0, FP16X3, PRECISION)
    return accumulator, new_maximum, total


@triton.jit(
    do_not_specialize=[
        "n_programs", "n_heads", "total_queries", "total_keys", "n_splits", "group", "left",
        "right",
    ]
)  # fmt: skip
def forward_kernel(
    query, key, value, peaks, starts_q, starts_k, out, lse,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    out_split, out_batch, out_head, out_row,
    n_programs, n_heads, total_queries, total_keys, n_splits, keys_per_split, group, left, right,
    scale_log2e, cap_log2e,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, Q_PER_KV: tl.constexpr, PACKED: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, IS_CAUSAL: tl.constexpr,
    LOWER_RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, FP16X3: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the output and log-sum-exp of a block of queries over one range (split) of the keys.

    Grid: (number of blocks of queries * batch * heads * splits,). With PACKED, batch is the number
    of sequences, and the number of blocks is that of the longest sequence.

    `mask_ops.mask_bounds` describes left, right, IS_CAUSAL and LOWER_RIGHT. left and right are read
    only with HAS_LEFT and HAS_RIGHT.

    Args:
        query: (batch, heads, total_queries, HEAD_DIM).
        key: (batch, heads / Q_PER_KV, total_keys, HEAD_DIM).
        value: (batch, heads / Q_PER_KV, total_keys, VALUE_DIM).
        peaks: largest magnitude of each head of query, key and value (see `tile_ops.peak_of`). Only
            with FP16X3.
        starts_q, starts_k: boundaries of the sequences (see `mask_ops.sequence_rows`); read only
            with PACKED.
        out: output, (splits, batch, heads, total_queries, VALUE_DIM): attention over the keys of
            each split. Its dtype is that of the inputs, or float32 with several splits.
        lse: output, float32 (splits, batch, heads, total_queries), contiguous: natural-log
            log-sum-exp of the scaled scores; -inf for a query that sees no key.
        *_split, *_batch, *_head, *_row: strides in elements; with PACKED, *_batch is 0.
        n_programs: batch * heads.
        n_heads: number of heads of queries.
        total_queries, total_keys: rows of query and key. With PACKED, these are the rows of all
            sequences, and the tensors have no batch dimension.
        keys_per_split: number of keys in each split except the last, a multiple of BLOCK_K.
        group: heads that are processed together, so that their keys and values stay in the L2 cache
            (see `tile_ops.schedule`).
        scale_log2e: scale of the scores times log2(e), not negative.
        cap_log2e: softcap times log2(e); read only with SOFTCAP.
        BLOCK_K: number of keys per tile of the inner loop. BLOCK_Q queries are a block.
        BLOCK_D, BLOCK_V: HEAD_DIM and VALUE_DIM rounded up to a power of two, at least 16.
        PACKED: whether the rows belong to several sequences, as described in `mask_ops`.
        SOFTCAP: see `base_plan.softcap_form`.
        FP16X3: whether float32 inputs are split into float16 halves. query, key and value are then
            contiguous, with an additional first dimension of size 2 (high half and low half).
        PRECISION: input precision of tl.dot for float32 tiles, "tf32" or "ieee".
        STAGES: stages of the software pipeline that loads keys and values.
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
    out_unit = 1.0
    if FP16X3:
        q_unit, k_unit = unit(peaks, 0, head, n_programs), unit(peaks, 1, kv_head, n_programs)
        scale_log2e *= q_unit * k_unit
        out_unit = unit(peaks, 2, kv_head, n_programs) * TOP_INVERSE
    query = sequence_base(query, head, n_heads, start_q, q_batch, q_head, q_row)
    key = sequence_base(key, kv_head, n_kv_heads, start_k, k_batch, k_head, k_row)
    value = sequence_base(value, kv_head, n_kv_heads, start_k, v_batch, v_head, v_row)
    matrices = tl.cast(n_matrices(n_programs, n_heads, PACKED), tl.int64)
    query_half = matrices * total_queries * HEAD_DIM
    key_half = matrices // Q_PER_KV * total_keys * HEAD_DIM
    value_half = matrices // Q_PER_KV * total_keys * VALUE_DIM
    q = load_operand(
        query, query_half, first_query, n_queries, q_row, HEAD_DIM, BLOCK_Q, BLOCK_D, True, FP16X3
    )
    accumulator = tl.zeros((BLOCK_Q, BLOCK_V), tl.float32)
    maximum = tl.full((BLOCK_Q,), FLOOR, tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)

    for start in tl.range(full_start, full_end, BLOCK_K, num_stages=STAGES):
        accumulator, maximum, total = _add_tile(
            accumulator, maximum, total, q, key, value, first_query, start, n_keys, key_half,
            value_half, k_row, v_row, lower, upper, scale_log2e, cap_log2e, HEAD_DIM, VALUE_DIM,
            BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_V, HAS_LEFT, HAS_RIGHT, SOFTCAP, False, FP16X3,
            PRECISION,
        )  # fmt: skip
    masked_from = first_key + (full_end - full_start)
    for position in tl.range(masked_from, last_key, BLOCK_K, num_stages=STAGES):
        start = masked_tile(position, full_start, full_end, HAS_LEFT)
        accumulator, maximum, total = _add_tile(
            accumulator, maximum, total, q, key, value, first_query, start, n_keys, key_half,
            value_half, k_row, v_row, lower, upper, scale_log2e, cap_log2e, HEAD_DIM, VALUE_DIM,
            BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_V, HAS_LEFT, HAS_RIGHT, SOFTCAP, True, FP16X3,
            PRECISION,
        )  # fmt: skip

    # A row without a visible key has a total of 0. Its output is 0 and its log-sum-exp -inf.
    seen = total != 0.0
    total = tl.where(seen, total, 1.0)
    result = accumulator / total[:, None] * out_unit
    row_lse = tl.where(seen, (maximum + tl.log2(total)) * LN2, float("-inf"))
    split = split.to(tl.int64)
    out = sequence_base(
        out + split * out_split, head, n_heads, start_q, out_batch, out_head, out_row
    )
    store_tile(out, first_query, n_queries, out_row, result, VALUE_DIM, BLOCK_Q, BLOCK_V)
    queries = first_query + tl.arange(0, BLOCK_Q)
    lse += split * matrices * total_queries
    lse += rows_before(head, n_heads, total_queries, start_q, PACKED)
    tl.store(lse + queries, row_lse, mask=queries < n_queries)
