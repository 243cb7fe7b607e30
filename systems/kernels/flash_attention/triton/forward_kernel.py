"""Forward pass of FlashAttention-2 in Triton (Dao 2023, algorithm 1), optionally split over keys.

A program processes BLOCK_Q queries of one head and loops over tiles of BLOCK_K keys. For each query
it has a running maximum m of the scores, a running sum l and a running output O. A tile of keys
with the scores S changes m, l and O to m', l' and O':

    S = q k^T    m' = max(m, scale log2(e) max_j S)    P = exp2(scale log2(e) S - m')
    l' = l exp2(m - m') + sum_j P                      O' = O exp2(m - m') + P v

The exponentials and m are in base 2, because GPUs have an instruction for exp2. After the loop, the
output is O / l, and the natural-log log-sum-exp is (m + log2 l) ln 2.

The first loop has no mask. It processes the tiles of keys that every query of the block sees. The
second loop has a mask. It processes the tiles on the diagonal and the incomplete tile at the end.
Keys that no query of the block sees are not loaded.

With few heads, there may be fewer blocks of queries than multiprocessors. Then the keys are split
into ranges, and a separate program processes each range. `combine_kernel` weights the partial
outputs by their log-sum-exps (Flash-Decoding, Dao et al. 2023).
"""

# Kernel arguments have Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from systems.kernels.flash_attention.triton.tile_ops import (
    TOP_INVERSE,
    TOP_POWER,
    add_product,
    as_operand,
    head_base,
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
    accumulator, maximum, total, q, key, value, first_query, first_key, n_keys, half_stride,
    key_row_stride, value_row_stride, scale_log2e,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    IS_CAUSAL: tl.constexpr, MASKED: tl.constexpr, FP16X3: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Update the running values of a block of queries with one tile of keys.

    These are the values of online softmax (algorithm 1 of FlashAttention-2, lines 7 to 10). The
    module docstring gives the formulas.

    Args:
        accumulator: running output O; with FP16X3, it is multiplied by 2^14 (TOP_POWER) and divided
            by the unit of the values (see `tile_ops.unit`).
        maximum: running maximum m of the scaled scores times log2(e).
        total: running sum l.
        q: operand with the queries (see `tile_ops.load_operand`).
        key, value: addresses of the keys and values of the head.
        first_query, first_key: index of the first query of the block and of the first key of the
            tile.
        half_stride: distance from the high to the low float16 half of the keys and values in
            memory, in elements; used only with FP16X3.
        scale_log2e: scale of the scores times log2(e); with FP16X3, also times the units of q and k
            (see `tile_ops.unit`).
        MASKED: whether the tile needs a mask, because it is on the diagonal or is incomplete.

    Returns:
        the new accumulator, maximum and total.

    `forward_kernel` describes the other arguments.
    """
    k = load_operand(
        key, half_stride, first_key, n_keys, key_row_stride, HEAD_DIM, BLOCK_K, BLOCK_D, MASKED,
        FP16X3,
    )  # fmt: skip
    scores = product(q, transposed(k, FP16X3), FP16X3, PRECISION)
    if MASKED:
        keys = first_key + tl.arange(0, BLOCK_K)
        visible = (keys < n_keys)[None, :]
        if IS_CAUSAL:
            queries = first_query + tl.arange(0, BLOCK_Q)
            visible = visible & (keys[None, :] <= queries[:, None])
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
        value, half_stride, first_key, n_keys, value_row_stride, HEAD_DIM, BLOCK_K, BLOCK_D, MASKED,
        FP16X3,
    )  # fmt: skip
    if FP16X3:
        p *= TOP_POWER
    p = as_operand(p, value.dtype.element_ty, FP16X3)
    accumulator = add_product(accumulator, p, v, FP16X3, PRECISION)
    return accumulator, new_maximum, total


@triton.jit(
    do_not_specialize=["n_programs", "n_heads", "n_queries", "n_keys", "n_splits", "group"]
)  # fmt: skip
def forward_kernel(
    query, key, value, peaks, out, lse,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    out_split, out_batch, out_head, out_row,
    n_programs, n_heads, n_queries, n_keys, n_splits, keys_per_split, group, scale_log2e,
    HEAD_DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    IS_CAUSAL: tl.constexpr, FP16X3: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Compute the output and log-sum-exp of a block of queries over one range of the keys.

    The keys may be split into several ranges (splits). A separate program then processes each
    split.

    Grid: (number of blocks of queries * batch * heads * splits,).

    Args:
        query: (batch, heads, n_queries, HEAD_DIM).
        key, value: (batch, heads, n_keys, HEAD_DIM).
        peaks: largest magnitude of each head of query, key and value (see `tile_ops.peak_of`); read
            only with FP16X3.
        out: output, (splits, batch, heads, n_queries, HEAD_DIM): attention over the keys of each
            split. It has the dtype of the inputs, or float32 if there are several splits.
        lse: output, float32 (splits, batch, heads, n_queries), contiguous: natural-log log-sum-exp
            of the scaled scores; -inf for a query that sees no key.
        *_split, *_batch, *_head, *_row: strides in elements.
        n_programs: batch * heads.
        n_heads: number of heads.
        n_splits: number of splits of the keys.
        keys_per_split: number of keys in each split except the last, a multiple of BLOCK_K.
        group: number of heads that are processed together, so that their keys and values stay in
            the L2 cache (see `tile_ops.schedule`).
        scale_log2e: scale of the scores times log2(e), not negative.
        HEAD_DIM: head dimension.
        BLOCK_Q: number of queries per block.
        BLOCK_K: number of keys per tile of the inner loop.
        BLOCK_D: HEAD_DIM rounded up to a power of two, at least 16.
        IS_CAUSAL: whether query i sees only keys 0 to i.
        FP16X3: whether the inputs are float32 tensors that are split into float16 halves. Then
            query, key and value are contiguous tensors with an additional first dimension of size 2
            (high half and low half).
        PRECISION: input precision of tl.dot for float32 tiles, "tf32" or "ieee".
        STAGES: number of stages of the software pipeline that loads keys and values.
    """
    n_blocks = tl.cdiv(n_queries, BLOCK_Q)
    block, head, split = schedule(
        tl.program_id(0), n_blocks, n_programs, n_splits, keys_per_split, group, BLOCK_Q, IS_CAUSAL,
        False,
    )  # fmt: skip
    first_query = block * BLOCK_Q
    first_key = split * keys_per_split
    last_key = tl.minimum(n_keys, first_key + keys_per_split)
    full_keys = n_keys  # number of keys that every query of the block sees
    if IS_CAUSAL:
        last_key = tl.minimum(last_key, first_query + BLOCK_Q)
        full_keys = tl.minimum(full_keys, first_query + 1)
    # Every split begins at a multiple of BLOCK_K, and every split except the last ends at one. So
    # the loop without a mask can end at full_keys rounded down to a multiple of BLOCK_K.
    full_end = tl.minimum(last_key, full_keys // BLOCK_K * BLOCK_K)
    full_end = tl.maximum(full_end, first_key)

    out_unit = 1.0
    if FP16X3:
        q_unit, k_unit = unit(peaks, 0, head, n_programs), unit(peaks, 1, head, n_programs)
        scale_log2e *= q_unit * k_unit
        out_unit = unit(peaks, 2, head, n_programs) * TOP_INVERSE
    query = head_base(query, head, n_heads, q_batch, q_head)
    key = head_base(key, head, n_heads, k_batch, k_head)
    value = head_base(value, head, n_heads, v_batch, v_head)
    half_stride = tl.cast(n_programs, tl.int64) * n_queries * HEAD_DIM
    q = load_operand(
        query, half_stride, first_query, n_queries, q_row, HEAD_DIM, BLOCK_Q, BLOCK_D, True, FP16X3
    )
    half_stride = tl.cast(n_programs, tl.int64) * n_keys * HEAD_DIM
    accumulator = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    maximum = tl.full((BLOCK_Q,), FLOOR, tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)

    for start in tl.range(first_key, full_end, BLOCK_K, num_stages=STAGES):
        accumulator, maximum, total = _add_tile(
            accumulator, maximum, total, q, key, value, first_query, start, n_keys, half_stride,
            k_row, v_row, scale_log2e, HEAD_DIM, BLOCK_Q, BLOCK_K, BLOCK_D, IS_CAUSAL, False,
            FP16X3, PRECISION,
        )  # fmt: skip
    for start in tl.range(full_end, last_key, BLOCK_K, num_stages=STAGES):
        accumulator, maximum, total = _add_tile(
            accumulator, maximum, total, q, key, value, first_query, start, n_keys, half_stride,
            k_row, v_row, scale_log2e, HEAD_DIM, BLOCK_Q, BLOCK_K, BLOCK_D, IS_CAUSAL, True,
            FP16X3, PRECISION,
        )  # fmt: skip

    # A row without a visible key has a total of 0. Its output is 0 and its log-sum-exp -inf.
    seen = total != 0.0
    total = tl.where(seen, total, 1.0)
    result = accumulator / total[:, None] * out_unit
    row_lse = tl.where(seen, (maximum + tl.log2(total)) * LN2, float("-inf"))
    out = head_base(out + split.to(tl.int64) * out_split, head, n_heads, out_batch, out_head)
    store_tile(out, first_query, n_queries, out_row, result, HEAD_DIM, BLOCK_Q, BLOCK_D)
    queries = first_query + tl.arange(0, BLOCK_Q)
    lse += (split.to(tl.int64) * n_programs + head) * n_queries
    tl.store(lse + queries, row_lse, mask=queries < n_queries)
