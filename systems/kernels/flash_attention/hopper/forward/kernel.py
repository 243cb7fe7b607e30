"""Warp-specialized forward pass of FlashAttention for Hopper, in Gluon.

The kernel computes the same results as `triton.forward_kernel`, with the methods of
FlashAttention-3 (Shah et al. 2024, sections 3.1 and 3.2).

The module `forward.work` describes work items. The warps of a program are:

    producer     1 warp with few registers; loads tiles into shared memory with TMA
    consumer c   1 warpgroup (4 warps) for 64 of the queries; computes scores, softmax and output.
                 Consumer 0 is the default partition of gl.warp_specialize

The kernel is persistent, with one or two programs per multiprocessor. The first work item of a
program has the program id as its index. The producer takes further work items from a counter in
global memory. The order of the work items is that of `tile_ops.schedule`. The producer publishes
the index of each work item to the consumers through shared memory. It can load the tiles of the
next work item while the consumers still process the current work item.

The producer passes data to the consumers through rings. A ring is a fixed number of slots in shared
memory that are used in turn. Tiles of keys and tiles of values have rings of STAGES slots, or share
one (see the module `forward.rings`). In the code, `n` counts the tiles of keys over all work items
of the program. It equally counts the tiles of values. Indices of work items have a ring of two
slots, and `turn` counts the work items. The ring of queries has slots for the 64 queries of a
consumer. There are slots for all consumers and two work items. If head_dim is above 128, there are
only CONSUMERS + 1 slots, so that the next queries of one consumer can be loaded early. Every slot
of a ring has two mbarriers:

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
  mbarrier wait is a branch, and ptxas does not move the wait for O across a branch. With a shared
  ring, v_j is loaded too late for this. The wait for v_(j-1) is repeated instead.
- P is passed to the next iteration in packed form, with two 16-bit values per register. Unpacked
  16-bit values need one permutation instruction per value in one of the consumers. float32 values
  need so many registers that they are spilled.
- Each of the four warps of a consumer waits for a WGMMA separately. All four must have waited
  before the warpgroup arrives at `empty`. The compiler inserts the barrier across the warps that is
  required for this before mbarrier.arrive, except shortly after another barrier. It must then be
  written out, as in `backward.d256`.
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

from systems.kernels.flash_attention.hopper.column_parts import (
    add_product,
    operands,
    scale_each_row,
    store_to_rows,
    store_to_shared,
    wait,
    zeros,
)
from systems.kernels.flash_attention.hopper.forward.rings import (
    allocate_ring,
    place_of_keys,
    place_of_values,
    produce,
    skip,
    tile_at,
)
from systems.kernels.flash_attention.hopper.forward.work import (
    ROWS,
    ForwardProblem,
    next_work,
)
from systems.kernels.flash_attention.hopper.gluon_names import async_store, barrier
from systems.kernels.flash_attention.hopper.registers import (
    column_sums,
    in_elements,
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
    s is not scaled. scale_log2e is 2 * log2(e) * scale / cap, so that exp2(s * scale_log2e) is
    exp(2 x). cap_log2e is the cap times log2(e).
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
def _scores(q, k, nothing, IN_PARTS: gl.constexpr):
    """Issue the WGMMAs of q k^T.

    q is (64, HEAD_DIM) and k is (BLOCK_K, HEAD_DIM), both as `rings.tile_at` returns them. The
    values of `nothing`, float32 (64, BLOCK_K) in registers, are not used.
    """
    s = warpgroup_mma(q[0], k[0].permute((1, 0)), nothing, use_acc=False, is_async=True)
    if IN_PARTS:
        s = warpgroup_mma(q[1], k[1].permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _consumer(
    tensors, problem, barriers, strides, scale_log2e, cap_log2e,
    WHICH: gl.constexpr, COLUMNS: gl.constexpr, VALUE_COLUMNS: gl.constexpr, MASKED: gl.constexpr,
    SOFTCAP: gl.constexpr, STAGES: gl.constexpr, SHARED_RING: gl.constexpr,
):  # fmt: skip
    """Compute the output and log-sum-exp of 64 queries of each work item. A consumer runs this.

    Consumer number WHICH computes the queries WHICH * 64 to WHICH * 64 + 63 of the work item.
    `hopper_forward_kernel` describes the constants.
    """
    out_desc, out, partials, lse, q_ring, k_ring, v_ring, o_smem, work_smem = tensors
    q_full, q_empty, k_full, k_empty, v_full, v_empty, work_full, work_empty = barriers
    CONSUMERS: gl.constexpr = problem.CONSUMERS
    BLOCK_K: gl.constexpr = problem.BLOCK_K
    Q_SLOTS: gl.constexpr = q_full.shape[0]
    HEAD_DIM: gl.constexpr = 256 if SHARED_RING else q_ring[0].shape[4]
    VALUE_DIM: gl.constexpr = 256 if SHARED_RING else v_ring[0].shape[4]
    # The last quarter of the columns is left out if all of it is padding.
    KEYS_IN_PARTS: gl.constexpr = COLUMNS * 4 <= HEAD_DIM * 3
    IN_PARTS: gl.constexpr = VALUE_COLUMNS * 4 <= VALUE_DIM * 3
    PENDING: gl.constexpr = 2 if IN_PARTS else 1  # number of WGMMAs of O
    dtype: gl.constexpr = q_ring[0].dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
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
        first = n
        last = first + item.n_tiles - 1
        n = skip(item.n_tiles - end, n, first, last, barriers, STAGES, SHARED_RING)

        # Tiles are processed from the last to the first. Unless the problem is BOUNDED, only the
        # first one processed may need a mask, for the diagonal or the end of the keys.
        place = place_of_keys(n, first, SHARED_RING)
        slot = place % STAGES
        mbarrier.wait(k_full.index(slot), place // STAGES & 1)
        # Wait for these keys before the queries. The producer loads the queries first, so the
        # previous use of their slot, which may be by another consumer, is then over.
        q_place = turn * CONSUMERS + WHICH
        q_slot = q_place % Q_SLOTS
        mbarrier.wait(q_full.index(q_slot), q_place // Q_SLOTS & 1)
        q = tile_at(q_ring, q_slot, SHARED_RING, KEYS_IN_PARTS)
        k = tile_at(k_ring, slot, SHARED_RING, KEYS_IN_PARTS)
        s = _scores(q, k, nothing, KEYS_IN_PARTS)
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
        o = zeros(VALUE_DIM, IN_PARTS)
        v_place = place_of_values(n, last, SHARED_RING)
        v_slot = v_place % STAGES
        v_phase = v_place // STAGES & 1
        if not SHARED_RING:
            mbarrier.wait(v_full.index(v_slot), v_phase)

        for _ in range(end - begin - 1):
            p_operand = operands(unpack(packed, dtype), VALUE_DIM, IN_PARTS)
            v = tile_at(v_ring, v_slot, SHARED_RING, IN_PARTS)
            used_slot = v_slot
            used_phase = v_phase
            n += 1
            place = place_of_keys(n, first, SHARED_RING)
            v_place = place_of_values(n, last, SHARED_RING)
            slot = place % STAGES
            v_slot = v_place % STAGES
            v_phase = v_place // STAGES & 1
            mbarrier.wait(k_full.index(slot), place // STAGES & 1)
            k = tile_at(k_ring, slot, SHARED_RING, KEYS_IN_PARTS)
            s_token = _scores(q, k, nothing, KEYS_IN_PARTS)
            if SHARED_RING:
                # These values are loaded to the slot of the previous keys, so they come late.
                mbarrier.wait(v_full.index(used_slot), used_phase)
            o_token = add_product(p_operand, v, o, IN_PARTS)
            # Wait for S only. The WGMMA of O stays in flight during the softmax.
            s = warpgroup_mma_wait(PENDING, deps=[s_token])
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
            if SHARED_RING:  # the same wait again: it returns at once
                mbarrier.wait(v_full.index(used_slot), used_phase)
            else:
                mbarrier.wait(v_full.index(v_slot), v_phase)
            o = wait(o_token, p_operand, IN_PARTS)
            mbarrier.arrive(v_empty.index(used_slot), count=1)
            o = scale_each_row(o, correction, IN_PARTS)
            packed = pack(p, dtype)

        mbarrier.arrive(q_empty.index(q_slot), count=1)
        p_operand = operands(unpack(packed, dtype), VALUE_DIM, IN_PARTS)
        if SHARED_RING:
            mbarrier.wait(v_full.index(v_slot), v_phase)
        v = tile_at(v_ring, v_slot, SHARED_RING, IN_PARTS)
        o_token = add_product(p_operand, v, o, IN_PARTS)
        o = wait(o_token, p_operand, IN_PARTS)
        mbarrier.arrive(v_empty.index(v_slot), count=1)
        n = skip(begin, n + 1, first, last, barriers, STAGES, SHARED_RING)

        # A row without a visible key has a total of 0. Its output is 0 and its log-sum-exp -inf.
        row_total = gl.convert_layout(gl.sum(total, 1), row_layout, assert_trivial=True)
        seen = row_total != 0.0
        row_total = gl.where(seen, row_total, 1.0)
        o = scale_each_row(o, 1.0 / row_total, IN_PARTS)
        if SOFTCAP:
            m += cap_log2e
        row_lse = gl.where(seen, (m + gl.log2(row_total)) * LN2, float("-inf"))
        rows_before = (item.split.to(gl.int64) * problem.n_programs + item.head) * problem.n_queries
        row = item.query_start + first_query
        batch, head = item.head // problem.n_heads, item.head % problem.n_heads
        if problem.SPLIT:
            target = partials + rows_before * VALUE_COLUMNS
            n_rows = problem.n_queries
            store_to_rows(target, o, first_query, n_rows, VALUE_COLUMNS, VALUE_COLUMNS, IN_PARTS)
        elif HEAD_DIM > 128:  # shared memory has no room for the output
            target = out + batch * in_elements(strides[0]) + head * in_elements(strides[1])
            n_rows = item.query_start + item.n_queries
            store_to_rows(target, o, row, n_rows, in_elements(strides[2]), VALUE_COLUMNS, IN_PARTS)
        else:
            # Wait until TMA has read the output of the previous work item from shared memory.
            tma.store_wait(0)
            barrier()
            store_to_shared(o_stage.reshape([ROWS, VALUE_DIM]), o, IN_PARTS)
            # Make the stores of all warps visible to TMA (the async proxy) before it reads them.
            fence_async_shared()
            barrier()
            if problem.PACKED:
                # TMA would also write to the first rows of the next sequence.
                if first_query + ROWS > item.n_queries:
                    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
                    rows = o_stage.reshape([ROWS, VALUE_DIM]).load(wide)
                    target = out + head * in_elements(strides[1])
                    out_row = in_elements(strides[2])
                    store_rows(target, rows, row, item.query_start + item.n_queries, out_row)
                else:
                    async_store(out_desc, [batch, head, row, 0], o_stage)
            else:
                async_store(out_desc, [batch, head, row, 0], o_stage)
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
        "group", "left", "right", "out_batch", "out_head", "out_row",
    ]
)  # fmt: skip
def hopper_forward_kernel(
    q_desc, k_desc, v_desc, out_desc, out, partials, lse, counters, starts_q, starts_k, blocks,
    n_work, n_programs, n_heads, n_queries, n_keys, n_splits, keys_per_split, group, left, right,
    out_batch, out_head, out_row, scale_log2e, cap_log2e,
    CONSUMERS: gl.constexpr, BLOCK_K: gl.constexpr, COLUMNS: gl.constexpr,
    VALUE_COLUMNS: gl.constexpr, MASKED: gl.constexpr, IS_CAUSAL: gl.constexpr,
    BOUNDED: gl.constexpr, LOWER_RIGHT: gl.constexpr, PACKED: gl.constexpr, SOFTCAP: gl.constexpr,
    STAGES: gl.constexpr, SHARED_RING: gl.constexpr, SPLIT: gl.constexpr, Q_PER_KV: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Compute attention and log-sum-exp with persistent, warp-specialized programs.

    Grid: (number of programs,), any number; the programs share the work items. Launch with
    num_warps=4, the number of warps of consumer 0.

    With packed sequences (PACKED), batch is 1, and n_queries and n_keys are the rows of all
    sequences. All masks then apply to the rows of one sequence.

    Args:
        q_desc, out_desc: TMA descriptors of q and the output, (batch, heads, n_queries, head_dim),
            with tiles of 64 rows. The output is written only if SPLIT is False. The tiles of q and
            k have 64, 128 or 256 columns. Those of v and the output have as many, or 128 if those
            of q have 256. With SHARED_RING, each copy loads a box of 64 columns, a third of a tile.
        k_desc, v_desc: TMA descriptors of k and v, (batch, heads // Q_PER_KV, n_keys, head_dim),
            with tiles of BLOCK_K rows.
        out: the output. Used if PACKED, for the last rows of a sequence, and if COLUMNS is above
            128.
        partials: float32 (splits, batch, heads, n_queries, VALUE_COLUMNS), contiguous, output:
            attention over the keys of each split. Written only if SPLIT.
        lse: float32 (splits, batch, heads, n_queries), contiguous, output: log-sum-exp (natural
            logarithm) of the scaled scores over the keys of each split; -inf for a query that sees
            no key of the split.
        counters: int32 (2,), must be zeros: the work items that programs have taken, except the
            first one of each program, and the programs that have finished. The kernel resets both
            at the end.
        starts_q, starts_k: boundaries of packed sequences, int32 (n_sequences + 1,).
        blocks: the blocks of CONSUMERS * 64 queries of packed sequences, as listed by
            `packed_blocks.packed_blocks_kernel`. Like starts_q and starts_k, read only if PACKED.
        n_work: blocks of CONSUMERS * 64 queries * batch * heads * splits. Not used if PACKED.
        n_programs: batch * heads.
        n_heads: number of heads of q.
        keys_per_split: number of keys in each split except the last, a multiple of BLOCK_K.
        group: number of heads whose work items run at about the same time, so that their keys and
            values stay in the L2 cache (see `tile_ops.schedule`).
        left, right: number of keys before and after its position that a query sees. Used only if
            BOUNDED, and right only if not IS_CAUSAL.
        out_batch, out_head, out_row: strides of out, in units of 8 elements.
        scale_log2e: scale of the scores times log2(e), not negative, and positive if BOUNDED. With
            SOFTCAP, see `capped`.
        cap_log2e: softcap times log2(e). Used only if SOFTCAP.
        CONSUMERS: number of consumer warpgroups, 2 or 3.
        COLUMNS: columns of q and k that the matmuls use: 64, 96, 128, 192 or 256. The tensors may
            have fewer. Missing columns are read as zeros.
        VALUE_COLUMNS: the same of v and the output. Up to 128, it is 64, 96 or 128, and the tensors
            may have fewer, but only if SPLIT is False. Missing columns are not written. Above, it
            is the number of columns of the tensors.
        MASKED: whether the last tile of keys may contain keys that some queries do not see.
        BOUNDED: whether the mask is given by left and right, and by LOWER_RIGHT. Otherwise, query
            i has the position of key i. True if PACKED is True. MASKED must then be True.
        LOWER_RIGHT: whether the last query has the position of the last key.
        PACKED: whether rows belong to packed sequences. SPLIT must then be False.
        STAGES: slots in shared memory for tiles of keys, and as many for tiles of values.
        SHARED_RING: whether keys and values share STAGES slots. COLUMNS must then be 192, and v
            must have the head_dim of q.
        Q_PER_KV: number of consecutive heads of q that have one head of k and v in common.
        REGISTERS: registers per thread of each consumer except consumer 0 (see `tiles.HopperTile`).
            PRODUCER_REGISTERS are those of the producer warp.
    """
    # Above 128 columns, shared memory has no room for the queries of two work items.
    Q_SLOTS: gl.constexpr = 2 * CONSUMERS if COLUMNS <= 128 else CONSUMERS + 1
    q_ring = allocate_ring(q_desc, Q_SLOTS, SHARED_RING)
    o_smem = q_ring[0]  # not used
    if COLUMNS <= 128:
        o_shape: gl.constexpr = [CONSUMERS, 1, 1, ROWS, out_desc.block_type.shape[3]]
        o_smem = gl.allocate_shared_memory(out_desc.dtype, o_shape, out_desc.layout)
    k_ring = allocate_ring(k_desc, STAGES, SHARED_RING)
    v_ring = k_ring
    if not SHARED_RING:
        v_ring = allocate_ring(v_desc, STAGES, False)
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    q_full = gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], layout)
    q_empty = gl.allocate_shared_memory(gl.int64, [Q_SLOTS, 1], layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    v_full, v_empty = k_full, k_empty
    if not SHARED_RING:
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
        v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], layout)
    work_smem = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    work_full = gl.allocate_shared_memory(gl.int64, [2, 1], layout)
    work_empty = gl.allocate_shared_memory(gl.int64, [2, 1], layout)
    for i in gl.static_range(2):
        mbarrier.init(work_full.index(i), count=1)
        mbarrier.init(work_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(Q_SLOTS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        if not SHARED_RING:
            mbarrier.init(v_full.index(i), count=1)
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
    loaded = (q_desc, k_desc, v_desc, q_ring, k_ring, v_ring, work_smem, counters)
    used = (out_desc, out, partials, lse, q_ring, k_ring, v_ring, o_smem, work_smem)
    strides = (out_batch, out_head, out_row)
    # Constants are separate arguments: as members of a named tuple they would become tensors.
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (
                    used, problem, barriers, strides, scale_log2e, cap_log2e, gl.constexpr(0),
                    COLUMNS, VALUE_COLUMNS, MASKED, SOFTCAP, STAGES, SHARED_RING)),
                (_consumer, (
                    used, problem, barriers, strides, scale_log2e, cap_log2e, gl.constexpr(1),
                    COLUMNS, VALUE_COLUMNS, MASKED, SOFTCAP, STAGES, SHARED_RING)),
                (produce, (loaded, problem, barriers, STAGES, SHARED_RING)),
            ],
            [4, 1], [REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consumer, (
                    used, problem, barriers, strides, scale_log2e, cap_log2e, gl.constexpr(0),
                    COLUMNS, VALUE_COLUMNS, MASKED, SOFTCAP, STAGES, SHARED_RING)),
                (_consumer, (
                    used, problem, barriers, strides, scale_log2e, cap_log2e, gl.constexpr(1),
                    COLUMNS, VALUE_COLUMNS, MASKED, SOFTCAP, STAGES, SHARED_RING)),
                (_consumer, (
                    used, problem, barriers, strides, scale_log2e, cap_log2e, gl.constexpr(2),
                    COLUMNS, VALUE_COLUMNS, MASKED, SOFTCAP, STAGES, SHARED_RING)),
                (produce, (loaded, problem, barriers, STAGES, SHARED_RING)),
            ],
            [4, 4, 1], [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
