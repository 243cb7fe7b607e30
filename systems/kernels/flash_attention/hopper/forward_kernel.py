"""Warp-specialized forward pass of FlashAttention for Hopper, in Gluon.

The kernel computes the same results as `triton.forward_kernel`, with the methods of
FlashAttention-3 (Shah et al. 2024, sections 3.1 and 3.2).

A work item is a block of CONSUMERS * 64 queries of one head, together with the keys that they see
(see the module `forward_work`). If the keys are split into ranges, a work item has only the keys of
one range. The warps of a program are:

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

from systems.kernels.flash_attention.hopper.forward_work import (
    ROWS,
    ForwardProblem,
    next_work,
    publish,
)
from systems.kernels.flash_attention.hopper.registers import (
    column_sums,
    pack,
    reciprocal,
    row_maximum,
    scale_rows,
    store_rows,
    unpack,
)

LN2 = gl.constexpr(0.6931471805599453)
FLOOR = gl.constexpr(-3.0e38)  # initial maximum of a row, as in `triton.forward_kernel`


@gluon.jit
def capped(s, scale_log2e, cap_log2e):
    """Return the capped scores in base 2, minus the cap: cap_log2e * (tanh(x) - 1).

    The formula is tanh(x) - 1 = -2 / (1 + exp(2 x)). Its absolute error is near cap_log2e * 2^-22.

    Args:
        s: scores before they are scaled.
        scale_log2e: 2 * log2(e) * scale / cap, so that exp2(s * scale_log2e) is exp(2 x).
        cap_log2e: the cap times log2(e).
    """
    return reciprocal(1.0 + gl.exp2(s * scale_log2e)) * (-2.0 * cap_log2e)


@gluon.jit
def _visible(item, problem, first_query, first_key, layout: gl.constexpr):
    """Return which keys of a tile the 64 queries from first_query on see, bool (64, BLOCK_K)."""
    keys = first_key + gl.arange(0, problem.BLOCK_K, gl.SliceLayout(0, layout))
    queries = first_query + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    if problem.BOUNDED:
        last = gl.minimum(queries + item.upper, item.n_keys - 1)
        first = queries + item.lower
        visible = (keys[None, :] <= last[:, None]) & (keys[None, :] >= first[:, None])
    else:
        visible = (keys < item.n_keys)[None, :]
        if problem.IS_CAUSAL:
            visible = visible & (keys[None, :] <= (queries + item.upper)[:, None])
    return visible


@gluon.jit
def _producer(tensors, problem, barriers, STAGES: gl.constexpr):
    """Load the data of all work items of a program into shared memory. The producer warp runs this.

    For each work item, the producer loads the queries first. It then loads the tiles of keys and
    values, from the last tile to the first. Each consumer has separate slots in shared memory for
    its queries, and only this consumer releases these slots.

    The tuples `tensors` and `barriers` are unpacked in the first lines of the function.
    `hopper_forward_kernel` describes STAGES.
    """
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, work_smem, counters = tensors
    q_full, q_empty, k_full, k_empty, v_full, v_empty, work_full, work_empty = barriers
    CONSUMERS: gl.constexpr = problem.CONSUMERS
    BLOCK_K: gl.constexpr = problem.BLOCK_K
    turn = 0
    n = 0
    work = gl.program_id(0)
    while work < problem.n_work:
        publish(work, work_smem, work_full, work_empty, turn)
        item = problem.locate(work)
        batch = item.head // problem.n_heads
        head = item.head % problem.n_heads
        kv_head = head // problem.Q_PER_KV
        first_query = item.query_start + item.first_query
        for c in gl.static_range(CONSUMERS):
            slot = turn % 2 * CONSUMERS + c
            mbarrier.wait(q_empty.index(slot), (turn // 2 & 1) ^ 1)
            mbarrier.expect(q_full.index(slot), q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                q_desc, [batch, head, first_query + c * ROWS, 0], q_full.index(slot),
                q_smem.index(slot),
            )  # fmt: skip
        start = item.key_start + item.first_key + (item.n_tiles - 1) * BLOCK_K
        for _ in range(item.n_tiles):
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
    publish(work, work_smem, work_full, work_empty, turn)
    # The last program to finish resets the counters for the next launch.
    if gl.atomic_add(counters + 1, 1) == gl.num_programs(0) - 1:
        gl.store(counters, 0)
        gl.store(counters + 1, 0)


@gluon.jit
def _skip(n_tiles, n, barriers, STAGES: gl.constexpr):
    """Release the next n_tiles slots of keys and of values without reading them.

    A slot is released after it is filled. Otherwise, the arrival at `empty` could count for the
    previous phase.

    Args:
        n: number of tiles that this consumer has released so far.

    Returns:
        The value of n for the next tile.
    """
    _, _, k_full, k_empty, v_full, v_empty, _, _ = barriers
    for _ in range(n_tiles):
        slot = n % STAGES
        phase = n // STAGES & 1
        mbarrier.wait(k_full.index(slot), phase)
        mbarrier.arrive(k_empty.index(slot), count=1)
        mbarrier.wait(v_full.index(slot), phase)
        mbarrier.arrive(v_empty.index(slot), count=1)
        n += 1
    return n


@gluon.jit
def _consumer(
    tensors, problem, barriers, strides, scale_log2e, cap_log2e,
    WHICH: gl.constexpr, HEAD_DIM: gl.constexpr, MASKED: gl.constexpr, SOFTCAP: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Compute the output and log-sum-exp of 64 queries of each work item. A consumer runs this.

    Consumer number WHICH computes the queries WHICH * 64 to WHICH * 64 + 63 of the work item.

    The tuples `tensors`, `barriers` and `strides` are unpacked in the first lines of the function
    and where they are used. `hopper_forward_kernel` describes the constants.
    """
    out_desc, out, partials, lse, q_smem, k_smem, v_smem, o_smem, work_smem = tensors
    q_full, q_empty, k_full, k_empty, v_full, v_empty, work_full, work_empty = barriers
    CONSUMERS: gl.constexpr = problem.CONSUMERS
    BLOCK_K: gl.constexpr = problem.BLOCK_K
    dtype: gl.constexpr = q_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_stage = o_smem.index(WHICH)
    nothing = gl.zeros([ROWS, BLOCK_K], gl.float32, s_layout)
    turn = 0
    n = 0
    work = next_work(work_smem, work_full, work_empty, turn)
    while work < problem.n_work:
        item = problem.locate(work)
        first_query = item.first_query + WHICH * ROWS
        # The producer loads all tiles that a query of the block sees. A consumer skips the tiles
        # that none of its queries sees.
        begin, end, full_start, full_end = item.tiles_of(first_query, problem)
        n = _skip(item.n_tiles - end, n, barriers, STAGES)

        # Tiles are processed from the last to the first. Without a left bound, only the tile that
        # is processed first may need a mask, for the diagonal or the end of the keys. It is handled
        # before the loop.
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
        first_key = item.first_key + (end - 1) * BLOCK_K
        if MASKED or SOFTCAP:
            if SOFTCAP:
                s = capped(s, scale_log2e, cap_log2e)
            else:
                s = s * scale_log2e
            # Scale before masking: if the scale is zero, -inf * 0 would be NaN.
            if MASKED:
                visible = _visible(item, problem, first_query, first_key, s_layout)
                s = gl.where(visible, s, float("-inf"))
            m = gl.maximum(row_maximum(s, row_layout), FLOOR)
            p = gl.exp2(s - m[:, None])
        else:
            m = row_maximum(s, row_layout) * scale_log2e
            p = gl.exp2(s * scale_log2e - m[:, None])
        total = column_sums(p)
        packed = pack(p, dtype)
        o = gl.zeros([ROWS, HEAD_DIM], gl.float32, o_layout)
        mbarrier.wait(v_full.index(slot), phase)

        for _ in range(end - begin - 1):
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
            if SOFTCAP:
                s = capped(s, scale_log2e, cap_log2e)
            if problem.BOUNDED:
                first_key -= BLOCK_K
                if (first_key < full_start) | (first_key >= full_end):
                    visible = _visible(item, problem, first_query, first_key, s_layout)
                    s = gl.where(visible, s, float("-inf"))
            if SOFTCAP:
                new_m = gl.maximum(m, row_maximum(s, row_layout))
                p = gl.exp2(s - new_m[:, None])
            else:
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
        n = _skip(begin, n + 1, barriers, STAGES)

        # A row without a visible key has a total of 0. Its output is 0 and its log-sum-exp -inf.
        row_total = gl.convert_layout(gl.sum(total, 1), row_layout, assert_trivial=True)
        seen = row_total != 0.0
        row_total = gl.where(seen, row_total, 1.0)
        o = scale_rows(o, 1.0 / row_total)
        if SOFTCAP:
            m += cap_log2e
        row_lse = gl.where(seen, (m + gl.log2(row_total)) * LN2, float("-inf"))
        rows_before = (item.split.to(gl.int64) * problem.n_programs + item.head) * problem.n_queries
        row = item.query_start + first_query
        if problem.SPLIT:
            store_rows(
                partials + rows_before * HEAD_DIM, o, first_query, problem.n_queries, HEAD_DIM
            )
        else:
            # Wait until TMA has read the output of the previous work item from shared memory.
            tma.store_wait(0)
            gl.thread_barrier()
            o_stage.reshape([ROWS, HEAD_DIM]).store(o.to(dtype))
            # Make the stores of all warps visible to TMA (the async proxy) before it reads them.
            fence_async_shared()
            gl.thread_barrier()
            batch, head = item.head // problem.n_heads, item.head % problem.n_heads
            if problem.PACKED:
                # TMA would also write to the first rows of the next sequence.
                if first_query + ROWS > item.n_queries:
                    out_head, out_row = strides
                    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
                    tile = o_stage.reshape([ROWS, HEAD_DIM]).load(wide)
                    target = out + head.to(gl.int64) * out_head
                    store_rows(target, tile, row, item.query_start + item.n_queries, out_row)
                else:
                    tma.async_copy_shared_to_global(out_desc, [batch, head, row, 0], o_stage)
            else:
                tma.async_copy_shared_to_global(out_desc, [batch, head, row, 0], o_stage)
        queries = first_query + gl.arange(0, ROWS, row_layout)
        row_lse_pointers = lse + rows_before + item.query_start
        gl.store(row_lse_pointers + queries, row_lse, mask=queries < item.n_queries)
        turn += 1
        work = next_work(work_smem, work_full, work_empty, turn)
    if not problem.SPLIT:
        tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "n_work", "n_programs", "n_heads", "n_queries", "n_keys", "n_splits", "keys_per_split",
        "group", "left", "right", "out_head", "out_row",
    ]
)  # fmt: skip
def hopper_forward_kernel(
    q_desc, k_desc, v_desc, out_desc, out, partials, lse, counters, starts_q, starts_k, blocks,
    n_work, n_programs, n_heads, n_queries, n_keys, n_splits, keys_per_split, group, left, right,
    out_head, out_row, scale_log2e, cap_log2e,
    CONSUMERS: gl.constexpr, BLOCK_K: gl.constexpr, HEAD_DIM: gl.constexpr,
    MASKED: gl.constexpr, IS_CAUSAL: gl.constexpr, BOUNDED: gl.constexpr,
    LOWER_RIGHT: gl.constexpr, PACKED: gl.constexpr, SOFTCAP: gl.constexpr, STAGES: gl.constexpr,
    SPLIT: gl.constexpr, Q_PER_KV: gl.constexpr, REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute attention and log-sum-exp with persistent, warp-specialized programs.

    A work item is a block of CONSUMERS * 64 queries of one head, with the keys that they see. If
    the keys are split into ranges (splits), a work item has the keys of one range.

    Grid: (number of programs,), any number; the programs share the work items. Launch with
    num_warps=4, the number of warps of consumer 0.

    With packed sequences (PACKED), batch is 1, and n_queries and n_keys are the rows of all
    sequences. All masks then apply to the rows of one sequence.

    Args:
        q_desc, out_desc: TMA descriptors of q and the output, (batch, heads, n_queries, HEAD_DIM),
            with tiles of 64 rows. The output is written only if SPLIT is False.
        k_desc, v_desc: TMA descriptors of k and v, (batch, heads // Q_PER_KV, n_keys, HEAD_DIM),
            with tiles of BLOCK_K rows.
        out: the output. It is used only if PACKED is True, for the last rows of a sequence.
        partials: float32 (splits, batch, heads, n_queries, HEAD_DIM), contiguous, output: attention
            over the keys of each split. It is written only if SPLIT is True.
        lse: float32 (splits, batch, heads, n_queries), contiguous, output: log-sum-exp (natural
            logarithm) of the scaled scores over the keys of each split; -inf for a query that sees
            no key of the split.
        counters: int32 (2,), must be zeros. The first counts the work items that programs have
            taken, except the first one of each program. The second counts the programs that have
            finished. The kernel resets both to zero at the end.
        starts_q, starts_k: boundaries of packed sequences, int32 (n_sequences + 1,).
        blocks: the blocks of CONSUMERS * 64 queries of packed sequences, as listed by
            `packed_blocks.packed_blocks_kernel`. starts_q, starts_k and blocks are read only if
            PACKED is True.
        n_work: number of work items: blocks of CONSUMERS * 64 queries * batch * heads * splits.
            Not used if PACKED is True.
        n_programs: batch * heads.
        n_heads: number of heads of q.
        n_queries, n_keys: number of queries and of keys per head.
        n_splits: number of ranges into which the keys are split.
        keys_per_split: number of keys in each split except the last, a multiple of BLOCK_K.
        group: number of heads whose work items run at about the same time, so that their keys and
            values stay in the L2 cache (see `tile_ops.schedule`).
        left, right: number of keys before and after its position that a query sees. They are used
            only if BOUNDED is True, and right only if IS_CAUSAL is False.
        out_head, out_row: strides of out, in elements. They are used only if PACKED is True.
        scale_log2e: scale of the scores times log2(e), not negative, and positive if BOUNDED is
            True. With SOFTCAP, see `capped`.
        cap_log2e: softcap times log2(e). It is used only if SOFTCAP is True.
        CONSUMERS: number of consumer warpgroups, 2 or 3.
        BLOCK_K: number of keys per tile.
        HEAD_DIM: 64 or 128. The tensors of the TMA descriptors may have fewer columns. The missing
            columns are read as zeros and are not written. SPLIT must then be False.
        MASKED: whether the last tile of keys may contain keys that some queries do not see.
        IS_CAUSAL: whether a query sees only the keys up to its position.
        BOUNDED: whether the mask is given by left and right, and by LOWER_RIGHT. Otherwise, query
            i has the position of key i. True if PACKED is True. MASKED must then be True.
        LOWER_RIGHT: whether the last query has the position of the last key.
        PACKED: whether rows belong to packed sequences. SPLIT must then be False.
        SOFTCAP: whether scores are capped.
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
    work_smem = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
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

    if PACKED:
        n_work = gl.load(blocks) * n_heads
    problem = ForwardProblem(
        n_work, n_programs, n_heads, n_queries, n_keys, n_splits, keys_per_split, group, left,
        right, starts_q, starts_k, blocks, CONSUMERS, BLOCK_K, IS_CAUSAL, SPLIT, Q_PER_KV, BOUNDED,
        LOWER_RIGHT, PACKED,
    )  # fmt: skip
    barriers = (q_full, q_empty, k_full, k_empty, v_full, v_empty, work_full, work_empty)
    loaded = (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, work_smem, counters)
    used = (out_desc, out, partials, lse, q_smem, k_smem, v_smem, o_smem, work_smem)
    strides = (out_head, out_row)
    # Constants are separate arguments: as members of a named tuple they would become tensors.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (
                    used, problem, barriers, strides, scale_log2e, cap_log2e, gl.constexpr(0),
                    HEAD_DIM, MASKED, SOFTCAP, STAGES)),
                (_consumer, (
                    used, problem, barriers, strides, scale_log2e, cap_log2e, gl.constexpr(1),
                    HEAD_DIM, MASKED, SOFTCAP, STAGES)),
                (_producer, (loaded, problem, barriers, STAGES)),
            ],
            [4, 1], [REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (
                    used, problem, barriers, strides, scale_log2e, cap_log2e, gl.constexpr(0),
                    HEAD_DIM, MASKED, SOFTCAP, STAGES)),
                (_consumer, (
                    used, problem, barriers, strides, scale_log2e, cap_log2e, gl.constexpr(1),
                    HEAD_DIM, MASKED, SOFTCAP, STAGES)),
                (_consumer, (
                    used, problem, barriers, strides, scale_log2e, cap_log2e, gl.constexpr(2),
                    HEAD_DIM, MASKED, SOFTCAP, STAGES)),
                (_producer, (loaded, problem, barriers, STAGES)),
            ],
            [4, 4, 1], [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
