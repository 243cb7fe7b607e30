"""Warp-specialized forward pass of FlashAttention for Hopper, in Gluon.

The kernel computes the same results as `triton.forward_kernel`, with the methods of
FlashAttention-3 (Shah et al. 2024, sections 3.1 and 3.2).

A work item is a block of CONSUMERS * 64 queries of one head, together with the keys that they see.
If the keys are split into ranges, a work item has only the keys of one range. The warps of a
program are:

    producer     1 warp with few registers; loads tiles into shared memory with TMA
    consumer c   1 warpgroup (4 warps) for 64 of the queries; computes scores, softmax and output.
                 Consumer 0 is the default partition of gl.warp_specialize

The kernel is persistent, with one program per multiprocessor. The first work item of a program has
the program id as its index. The producer takes further work items from a counter in global memory.
The order of the work items is that of `tile_ops.schedule`. The producer publishes the index of each
work item to the consumers through shared memory. It can load the tiles of the next work item while
the consumers still process the current work item.

The producer passes data to the consumers through rings. A ring is a fixed number of slots in shared
memory that are used in turn. Tiles of keys and tiles of values have rings of STAGES slots. In the
code, `n` counts the tiles of keys over all work items of the program. It equally counts the tiles
of values. Queries and indices of work items have rings of two slots, and `turn` counts the work
items. Every slot of a ring has two mbarriers:

    full    completes a phase when the slot is filled. For a tile, mbarrier.expect arrives and sets
            the number of bytes, and the phase completes when TMA has written them. For the index of
            a work item, the producer arrives
    empty   completes a phase when every reader has arrived; the slot may then be overwritten

The uses of a slot are numbered from 0. Use i is phase i of both mbarriers. A wait needs the parity
of the phase for which it waits. A reader waits for phase i of `full`, with parity i & 1. A writer
waits for phase i - 1 of `empty`, with the opposite parity. For i = 0, the wait of the writer
returns at once, because the phase before phase 0 counts as complete.

This is the main loop of a consumer. k_j and v_j are the tiles of keys and values that are
processed in iteration j. The scale includes the factor log2(e). m is the maximum of the scaled
scores of each query so far. The correction rescales the earlier output when m grows:

    issue S_j = q k_j^T               WGMMA, asynchronous
    issue O += P_(j-1) v_(j-1)        WGMMA, asynchronous, executes after S_j
    wait for S_j                      the slot of k_j is released
    P_j = exp2(S_j * scale - m)       m and the correction are computed first. All of this
                                      overlaps O += P_(j-1) v_(j-1)
    wait for O                        the slot of v_(j-1) is released
    O *= correction

The exponentials of a consumer therefore overlap its second matmul and the matmuls of the other
consumers. FlashAttention-3 also has a pingpong schedule, in which the consumers take turns to issue
matmuls. This kernel does not use it, because it is 2% to 5% slower on an H200.

Constraints imposed by the compiler:

- An asynchronous WGMMA reads P from registers, which must not change until the WGMMA has completed.
  To ensure this, P is a dependency (deps) of the wait for the WGMMA.
- ptxas may move the wait for a WGMMA above earlier arithmetic, which would undo the overlap. To
  prevent this, the mbarrier wait for v_j is placed between the softmax and the wait for O. The
  mbarrier wait is a branch, and ptxas does not move the wait for O across a branch.
- P is passed to the next iteration in packed form, with two 16-bit values per register. Unpacked
  16-bit values need one permutation instruction per value in one of the consumers. float32 values
  need so many registers that they are spilled.
- Each of the four warps of a consumer waits for a WGMMA separately. All four must have waited
  before the warpgroup arrives at `empty`. Gluon's mbarrier.arrive includes the barrier across the
  warps that is required for this.
"""

# Kernel arguments have Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from systems.kernels.flash_attention.hopper.registers import (
    column_sums,
    pack,
    row_maximum,
    scale_rows,
    unpack,
)
from systems.kernels.flash_attention.triton.tile_ops import schedule

LN2 = gl.constexpr(0.6931471805599453)
FLOOR = gl.constexpr(-3.0e38)  # initial maximum of a row, as in `triton.forward_kernel`
ROWS = gl.constexpr(64)  # number of queries per consumer: the rows of a WGMMA


@gluon.jit
def _next_work(next_work, full, empty, turn):
    """Return the index of the next work item, as published by the producer warp.

    The function waits until the index is published. An index of n_work or more means that no work
    item is left.

    Args:
        next_work: ring of two indices in shared memory.
        full, empty: mbarriers of this ring (see the module docstring).
        turn: number of work items that this program has already processed.
    """
    slot = turn % 2
    mbarrier.wait(full.index(slot), turn // 2 & 1)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    work = gl.max(next_work.index(slot).load(one), 0)
    mbarrier.arrive(empty.index(slot), count=1)
    return work


@gluon.jit
def _publish(work, next_work, full, empty, turn):
    slot = turn % 2
    mbarrier.wait(empty.index(slot), (turn // 2 & 1) ^ 1)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    next_work.index(slot).store(gl.full([1], 0, gl.int32, one) + work)
    mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def _locate(
    work, n_programs, n_queries, n_keys, n_splits, keys_per_split, group,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, IS_CAUSAL: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Return the position of a work item: which head, which queries and which keys.

    Args:
        work: index of the work item, in the order of `tile_ops.schedule`.
        BLOCK_Q: number of queries per work item.
        BLOCK_K: number of keys per tile.
        SPLIT: whether the keys are split into several ranges.
        n_programs, n_queries, n_keys, n_splits, keys_per_split, group: as for
            `hopper_forward_kernel`.

    Returns:
        head: index of the head, which counts the heads of all batch elements.
        split: index of the range of keys.
        first_query: index of the first query.
        first_key: index of the first key.
        last_key: index after the last key that any query of the work item sees. It may be less than
            first_key.
        n_tiles: number of tiles of keys, at least 1.
    """
    if not SPLIT:
        n_splits = 1
    block, head, split = schedule(
        work, gl.cdiv(n_queries, BLOCK_Q), n_programs, n_splits, keys_per_split, group,
        BLOCK_Q, IS_CAUSAL, False,
    )  # fmt: skip
    first_query = block * BLOCK_Q
    first_key = 0
    last_key = n_keys
    if SPLIT:
        first_key = split * keys_per_split
        last_key = gl.minimum(last_key, first_key + keys_per_split)
    if IS_CAUSAL:
        last_key = gl.minimum(last_key, gl.minimum(first_query + BLOCK_Q, n_queries))
    n_tiles = gl.maximum(1, gl.cdiv(last_key - first_key, BLOCK_K))
    return head, split, first_query, first_key, last_key, n_tiles


@gluon.jit
def _producer(
    tensors, scalars, barriers,
    CONSUMERS: gl.constexpr, BLOCK_K: gl.constexpr, IS_CAUSAL: gl.constexpr,
    STAGES: gl.constexpr, SPLIT: gl.constexpr, Q_PER_KV: gl.constexpr,
):  # fmt: skip
    """Load the data of all work items of a program into shared memory. The producer warp runs this.

    For each work item, the producer loads the queries first. It then loads the tiles of keys and
    values, from the last tile to the first. Each consumer has separate slots in shared memory for
    its queries, and only this consumer releases these slots.

    The first three arguments are tuples, which the first lines of the function unpack.
    `hopper_forward_kernel` describes the constants.
    """
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, next_work, counters = tensors
    n_work, n_programs, n_heads, n_queries, n_keys, n_splits, keys_per_split, group = scalars
    q_full, q_empty, k_full, k_empty, v_full, v_empty, work_full, work_empty = barriers
    BLOCK_Q: gl.constexpr = CONSUMERS * ROWS
    turn = 0
    n = 0
    work = gl.program_id(0)
    while work < n_work:
        _publish(work, next_work, work_full, work_empty, turn)
        head, _, first_query, first_key, _, n_tiles = _locate(
            work, n_programs, n_queries, n_keys, n_splits, keys_per_split, group,
            BLOCK_Q, BLOCK_K, IS_CAUSAL, SPLIT,
        )  # fmt: skip
        batch = head // n_heads
        head = head % n_heads
        kv_head = head // Q_PER_KV
        for c in gl.static_range(CONSUMERS):
            slot = turn % 2 * CONSUMERS + c
            mbarrier.wait(q_empty.index(slot), (turn // 2 & 1) ^ 1)
            mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                q_desc, [batch, head, first_query + c * ROWS, 0], q_full.index(slot),
                q_smem.index(slot),
            )  # fmt: skip
        start = first_key + (n_tiles - 1) * BLOCK_K
        for _ in range(n_tiles):
            slot = n % STAGES
            phase = (n // STAGES & 1) ^ 1
            mbarrier.wait(k_empty.index(slot), phase)
            mbarrier.expect(k_full.index(slot), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                k_desc, [batch, kv_head, start, 0], k_full.index(slot), k_smem.index(slot)
            )
            mbarrier.wait(v_empty.index(slot), phase)
            mbarrier.expect(v_full.index(slot), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                v_desc, [batch, kv_head, start, 0], v_full.index(slot), v_smem.index(slot)
            )
            start -= BLOCK_K
            n += 1
        turn += 1
        work = gl.num_programs(0) + gl.atomic_add(counters, 1, sem="relaxed")
    # Publish an index of n_work or more, at which the consumers stop.
    _publish(work, next_work, work_full, work_empty, turn)
    # The last program to finish resets the counters for the next launch.
    if gl.atomic_add(counters + 1, 1) == gl.num_programs(0) - 1:
        gl.store(counters, 0)
        gl.store(counters + 1, 0)


@gluon.jit
def _consumer(
    tensors, scalars, barriers, scale_log2e,
    WHICH: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_K: gl.constexpr, HEAD_DIM: gl.constexpr,
    IS_CAUSAL: gl.constexpr, MASKED: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Compute the output and log-sum-exp of 64 queries of each work item. A consumer runs this.

    Consumer number WHICH computes the queries WHICH * 64 to WHICH * 64 + 63 of the work item.

    The first three arguments are tuples, which the first lines of the function unpack.
    `hopper_forward_kernel` describes the other constants.
    """
    out_desc, partials, lse, q_smem, k_smem, v_smem, o_smem, next_work = tensors
    n_work, n_programs, n_heads, n_queries, n_keys, n_splits, keys_per_split, group = scalars
    q_full, q_empty, k_full, k_empty, v_full, v_empty, work_full, work_empty = barriers
    BLOCK_Q: gl.constexpr = CONSUMERS * ROWS
    dtype: gl.constexpr = q_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_stage = o_smem.index(WHICH)
    nothing = gl.zeros([ROWS, BLOCK_K], gl.float32, s_layout)
    turn = 0
    n = 0
    work = _next_work(next_work, work_full, work_empty, turn)
    while work < n_work:
        head, split, first_query, first_key, last_key, n_tiles = _locate(
            work, n_programs, n_queries, n_keys, n_splits, keys_per_split, group,
            BLOCK_Q, BLOCK_K, IS_CAUSAL, SPLIT,
        )  # fmt: skip
        first_query += WHICH * ROWS
        # The producer loads all tiles that the last query of the block sees. A consumer skips the
        # tiles that none of its queries sees, and all tiles but one if its queries are padding. It
        # waits until a skipped slot is filled, and then releases it. Without this wait, the arrival
        # at `empty` could count for the previous phase.
        n_mine = n_tiles
        if IS_CAUSAL:
            end = gl.minimum(last_key, first_query + ROWS)
            n_mine = gl.maximum(1, gl.cdiv(end - first_key, BLOCK_K))
        n_mine = gl.where(first_query < n_queries, n_mine, 1)
        for _ in range(n_tiles - n_mine):
            slot = n % STAGES
            phase = n // STAGES & 1
            mbarrier.wait(k_full.index(slot), phase)
            mbarrier.arrive(k_empty.index(slot), count=1)
            mbarrier.wait(v_full.index(slot), phase)
            mbarrier.arrive(v_empty.index(slot), count=1)
            n += 1

        # Tiles are processed from the last to the first. So only the tile that is processed first
        # may need a mask, for the diagonal or the end of the keys. It is handled before the loop.
        q_slot = turn % 2 * CONSUMERS + WHICH
        mbarrier.wait(q_full.index(q_slot), turn // 2 & 1)
        q = q_smem.index(q_slot).reshape([ROWS, HEAD_DIM])
        slot = n % STAGES
        phase = n // STAGES & 1
        mbarrier.wait(k_full.index(slot), phase)
        k = k_smem.index(slot).reshape([BLOCK_K, HEAD_DIM]).permute((1, 0))
        s = warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(slot), count=1)
        if MASKED:
            columns = gl.arange(0, BLOCK_K, gl.SliceLayout(0, s_layout))
            keys = first_key + (n_mine - 1) * BLOCK_K + columns
            visible = (keys < n_keys)[None, :]
            if IS_CAUSAL:
                queries = first_query + gl.arange(0, ROWS, row_layout)
                visible = visible & (keys[None, :] <= queries[:, None])
            # Scale before masking: if the scale is zero, -inf * 0 would be NaN.
            s = gl.where(visible, s * scale_log2e, float("-inf"))
            m = gl.maximum(row_maximum(s, row_layout), FLOOR)
            p = gl.exp2(s - m[:, None])
        else:
            m = row_maximum(s, row_layout) * scale_log2e
            p = gl.exp2(s * scale_log2e - m[:, None])
        total = column_sums(p)
        packed = pack(p, dtype)
        o = gl.zeros([ROWS, HEAD_DIM], gl.float32, o_layout)
        mbarrier.wait(v_full.index(slot), phase)

        for _ in range(n_mine - 1):
            p_operand = unpack(packed, dtype, p_layout)
            v = v_smem.index(slot).reshape([BLOCK_K, HEAD_DIM])
            v_slot = slot
            n += 1
            slot = n % STAGES
            phase = n // STAGES & 1
            mbarrier.wait(k_full.index(slot), phase)
            k = k_smem.index(slot).reshape([BLOCK_K, HEAD_DIM]).permute((1, 0))
            s_token = warpgroup_mma(q, k, nothing, use_acc=False, is_async=True)
            o_token = warpgroup_mma(p_operand, v, o, is_async=True)
            # Wait for S only. One WGMMA, that of O, stays in flight during the softmax.
            s = warpgroup_mma_wait(1, deps=[s_token])
            mbarrier.arrive(k_empty.index(slot), count=1)
            # The scale is not negative, so max(scale * s) = scale * max(s).
            new_m = gl.maximum(m, row_maximum(s, row_layout) * scale_log2e)
            p = gl.exp2(s * scale_log2e - new_m[:, None])
            correction = gl.exp2(m - new_m)
            total = scale_rows(total, correction) + column_sums(p)
            m = new_m
            # This wait keeps ptxas from moving the next wait above the softmax (see the module).
            mbarrier.wait(v_full.index(slot), phase)
            o, p_operand = warpgroup_mma_wait(0, deps=[o_token, p_operand])
            mbarrier.arrive(v_empty.index(v_slot), count=1)
            o = scale_rows(o, correction)
            packed = pack(p, dtype)

        mbarrier.arrive(q_empty.index(q_slot), count=1)
        p_operand = unpack(packed, dtype, p_layout)
        v = v_smem.index(slot).reshape([BLOCK_K, HEAD_DIM])
        o_token = warpgroup_mma(p_operand, v, o, is_async=True)
        o, p_operand = warpgroup_mma_wait(0, deps=[o_token, p_operand])
        mbarrier.arrive(v_empty.index(slot), count=1)
        n += 1

        # A row without a visible key has a total of 0. Its output is 0 and its log-sum-exp -inf.
        row_total = gl.convert_layout(gl.sum(total, 1), row_layout, assert_trivial=True)
        seen = row_total != 0.0
        row_total = gl.where(seen, row_total, 1.0)
        o = scale_rows(o, 1.0 / row_total)
        row_lse = gl.where(seen, (m + gl.log2(row_total)) * LN2, float("-inf"))
        if SPLIT:
            row = gl.arange(0, ROWS, gl.SliceLayout(1, o_layout))
            column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, o_layout))
            rows_before = (split.to(gl.int64) * n_programs + head) * n_queries + first_query
            gl.store(
                partials + rows_before * HEAD_DIM + (row[:, None] * HEAD_DIM + column[None, :]),
                o, mask=(row < n_queries - first_query)[:, None],
            )  # fmt: skip
        else:
            # Wait until TMA has read the output of the previous work item from shared memory.
            tma.store_wait(0)
            gl.thread_barrier()
            o_stage.reshape([ROWS, HEAD_DIM]).store(o.to(dtype))
            # Make the stores of all warps visible to TMA (the async proxy) before it reads them.
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(
                out_desc, [head // n_heads, head % n_heads, first_query, 0], o_stage
            )
        queries = first_query + gl.arange(0, ROWS, row_layout)
        row_lse_pointers = lse + (gl.to_tensor(split).to(gl.int64) * n_programs + head) * n_queries
        gl.store(row_lse_pointers + queries, row_lse, mask=queries < n_queries)
        turn += 1
        work = _next_work(next_work, work_full, work_empty, turn)
    if not SPLIT:
        tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "n_work", "n_programs", "n_heads", "n_queries", "n_keys", "n_splits", "keys_per_split",
        "group",
    ]
)  # fmt: skip
def hopper_forward_kernel(
    q_desc, k_desc, v_desc, out_desc, partials, lse, counters,
    n_work, n_programs, n_heads, n_queries, n_keys, n_splits, keys_per_split, group, scale_log2e,
    CONSUMERS: gl.constexpr, BLOCK_K: gl.constexpr, HEAD_DIM: gl.constexpr,
    IS_CAUSAL: gl.constexpr, MASKED: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
    Q_PER_KV: gl.constexpr, REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute attention and log-sum-exp with persistent, warp-specialized programs.

    A work item is a block of CONSUMERS * 64 queries of one head, with the keys that they see. If
    the keys are split into ranges (splits), a work item has the keys of one range.

    Grid: (number of programs,), any number; the programs share the work items. Launch with
    num_warps=4, the number of warps of consumer 0.

    Args:
        q_desc, out_desc: TMA descriptors of q and the output, (batch, heads, n_queries, HEAD_DIM),
            with tiles of 64 rows. The output is written only if SPLIT is False.
        k_desc, v_desc: TMA descriptors of k and v, (batch, heads // Q_PER_KV, n_keys, HEAD_DIM),
            with tiles of BLOCK_K rows.
        partials: float32 (splits, batch, heads, n_queries, HEAD_DIM), contiguous, output: attention
            over the keys of each split. It is written only if SPLIT is True.
        lse: float32 (splits, batch, heads, n_queries), contiguous, output: log-sum-exp (natural
            logarithm) of the scaled scores over the keys of each split; -inf for a query that sees
            no key of the split.
        counters: int32 (2,), must be zeros. The first counts the work items that programs have
            taken, except the first one of each program. The second counts the programs that have
            finished. The kernel resets both to zero at the end.
        n_work: number of work items: blocks of CONSUMERS * 64 queries * batch * heads * splits.
        n_programs: batch * heads.
        n_heads: number of heads of q.
        n_queries, n_keys: number of queries and of keys per head.
        n_splits: number of ranges into which the keys are split.
        keys_per_split: number of keys in each split except the last, a multiple of BLOCK_K.
        group: number of heads whose work items run at about the same time, so that their keys and
            values stay in the L2 cache (see `tile_ops.schedule`).
        scale_log2e: scale of the scores times log2(e), not negative.
        CONSUMERS: number of consumer warpgroups, 2 or 3.
        BLOCK_K: number of keys per tile.
        HEAD_DIM: 64 or 128. The tensors of the TMA descriptors may have fewer columns. The missing
            columns are read as zeros and are not written. SPLIT must then be False.
        IS_CAUSAL: whether query i sees only the keys 0 to i.
        MASKED: whether the last tile of keys may contain keys that some queries do not see.
        STAGES: number of slots in shared memory for tiles of keys, and also number of slots for
            tiles of values.
        SPLIT: whether the keys are split into several ranges.
        Q_PER_KV: number of consecutive heads of q that have one head of k and v in common.
        REGISTERS: registers per thread of each consumer except consumer 0 (see
            `forward_launch.HopperTile`).
        PRODUCER_REGISTERS: registers per thread of the producer warp.
    """
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [2 * CONSUMERS, 1, 1, ROWS, HEAD_DIM], q_desc.layout)
    o_smem = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, HEAD_DIM], out_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_K, HEAD_DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_K, HEAD_DIM], v_desc.layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [2 * CONSUMERS, 1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [2 * CONSUMERS, 1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    next_work = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    work_full = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    work_empty = gl.allocate_shared_memory(gl.int64, [2, 1], barrier)
    for i in gl.static_range(2):
        mbarrier.init(work_full.index(i), count=1)
        mbarrier.init(work_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(2 * CONSUMERS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    fence_async_shared()

    scalars = (n_work, n_programs, n_heads, n_queries, n_keys, n_splits, keys_per_split, group)
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty, work_full, work_empty)
    loaded = (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, next_work, counters)
    used = (out_desc, partials, lse, q_smem, k_smem, v_smem, o_smem, next_work)
    # Constants are separate arguments: as members of a named tuple they would become tensors.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (
                    used, scalars, barriers, scale_log2e, gl.constexpr(0), CONSUMERS, BLOCK_K,
                    HEAD_DIM, IS_CAUSAL, MASKED, STAGES, SPLIT)),
                (_consumer, (
                    used, scalars, barriers, scale_log2e, gl.constexpr(1), CONSUMERS, BLOCK_K,
                    HEAD_DIM, IS_CAUSAL, MASKED, STAGES, SPLIT)),
                (_producer, (
                    loaded, scalars, barriers, CONSUMERS, BLOCK_K, IS_CAUSAL, STAGES, SPLIT,
                    Q_PER_KV)),
            ],
            [4, 1], [REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (
                    used, scalars, barriers, scale_log2e, gl.constexpr(0), CONSUMERS, BLOCK_K,
                    HEAD_DIM, IS_CAUSAL, MASKED, STAGES, SPLIT)),
                (_consumer, (
                    used, scalars, barriers, scale_log2e, gl.constexpr(1), CONSUMERS, BLOCK_K,
                    HEAD_DIM, IS_CAUSAL, MASKED, STAGES, SPLIT)),
                (_consumer, (
                    used, scalars, barriers, scale_log2e, gl.constexpr(2), CONSUMERS, BLOCK_K,
                    HEAD_DIM, IS_CAUSAL, MASKED, STAGES, SPLIT)),
                (_producer, (
                    loaded, scalars, barriers, CONSUMERS, BLOCK_K, IS_CAUSAL, STAGES, SPLIT,
                    Q_PER_KV)),
            ],
            [4, 4, 1], [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
