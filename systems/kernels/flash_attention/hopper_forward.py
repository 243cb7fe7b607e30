"""draft"""

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

LN2 = gl.constexpr(0.6931471805599453)
FLOOR = gl.constexpr(-3.0e38)
ROWS = gl.constexpr(64)


@gluon.jit
def _place(turn, n_tiles, SNAKE: gl.constexpr):
    """Which tile is this program's at its turn."""
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    if SNAKE:
        program = gl.where(turn % 2 == 0, program, programs - 1 - program)
    return turn * programs + program


@gluon.jit
def _work(
    tile, n_programs, n_queries, n_keys, keys_a_split, group,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, IS_CAUSAL: gl.constexpr,
):
    n_blocks = gl.cdiv(n_queries, BLOCK_Q)
    split = tile // (n_blocks * n_programs)
    within = tile % (n_blocks * n_programs)
    first = within // (group * n_blocks) * group
    within = within % (group * n_blocks)
    size = gl.minimum(group, n_programs - first)
    block = within // size
    if IS_CAUSAL:
        block = n_blocks - 1 - block
    head = first + within % size
    first_query = block * BLOCK_Q
    first_key = split * keys_a_split
    last_key = gl.minimum(n_keys, first_key + keys_a_split)
    if IS_CAUSAL:
        last_key = gl.minimum(last_key, first_query + BLOCK_Q)
    n_tiles = gl.maximum(1, gl.cdiv(last_key - first_key, BLOCK_K))
    return head, split, first_query, first_key, last_key, n_tiles


@gluon.jit
def _take_turn(turns, n, WHICH: gl.constexpr):
    mbarrier.wait(turns.index(WHICH), (n & 1) ^ (1 if WHICH == 0 else 0))


@gluon.jit
def _pass_turn(turns, WHICH: gl.constexpr, CONSUMERS: gl.constexpr):
    mbarrier.arrive(turns.index((WHICH + 1) % CONSUMERS), count=1)


@gluon.jit
def _producer(
    common,
    CONSUMERS: gl.constexpr, BLOCK_K: gl.constexpr, IS_CAUSAL: gl.constexpr,
    STAGES: gl.constexpr,
):
    (
        q_desc, k_desc, v_desc, q_smem, k_smem, v_smem,
        q_full, q_empty, k_full, k_empty, v_full, v_empty,
        n_work, n_programs, n_heads, n_queries, n_keys, keys_a_split, group,
    ) = common
    BLOCK_Q: gl.constexpr = CONSUMERS * ROWS
    turn = 0
    n = 0
    tile = _place(turn, n_work, IS_CAUSAL)
    while tile < n_work:
        head, split, first_query, first_key, last_key, n_tiles = _work(
            tile, n_programs, n_queries, n_keys, keys_a_split, group, BLOCK_Q, BLOCK_K, IS_CAUSAL
        )
        b, h = head // n_heads, head % n_heads
        for c in gl.static_range(CONSUMERS):
            mbarrier.wait(q_empty.index(c), (turn & 1) ^ 1)
            mbarrier.expect(q_full.index(c), q_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                q_desc, [b, h, first_query + c * ROWS, 0], q_full.index(c), q_smem.index(c)
            )
        start = first_key + (n_tiles - 1) * BLOCK_K
        for i in range(n_tiles):
            stage = n % STAGES
            phase = (n // STAGES & 1) ^ 1
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                k_desc, [b, h, start, 0], k_full.index(stage), k_smem.index(stage)
            )
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(
                v_desc, [b, h, start, 0], v_full.index(stage), v_smem.index(stage)
            )
            start -= BLOCK_K
            n += 1
        turn += 1
        tile = _place(turn, n_work, IS_CAUSAL)


@gluon.jit
def _consumer(
    common,
    WHICH: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_K: gl.constexpr, HEAD_DIM: gl.constexpr,
    IS_CAUSAL: gl.constexpr, MASKED: gl.constexpr, STAGES: gl.constexpr,
    PING_PONG: gl.constexpr, SPLIT: gl.constexpr,
):
    (
        out_desc, parts, lse, q_smem, k_smem, v_smem, o_smem,
        q_full, q_empty, k_full, k_empty, v_full, v_empty, turns,
        n_work, n_programs, n_heads, n_queries, n_keys, keys_a_split, group, scale_log2e,
    ) = common
    BLOCK_Q: gl.constexpr = CONSUMERS * ROWS
    dtype: gl.constexpr = q_smem.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    out_row_layout: gl.constexpr = gl.SliceLayout(1, o_layout)

    q = q_smem.index(WHICH).reshape([ROWS, HEAD_DIM])
    o_stage = o_smem.index(WHICH)
    turn = 0
    n = 0
    tile = _place(turn, n_work, IS_CAUSAL)
    while tile < n_work:
        head, split, first_query, first_key, last_key, n_tiles = _work(
            tile, n_programs, n_queries, n_keys, keys_a_split, group, BLOCK_Q, BLOCK_K, IS_CAUSAL
        )
        first_query += WHICH * ROWS
        mine = n_tiles
        if IS_CAUSAL:
            own_last = gl.minimum(last_key, first_query + ROWS)
            mine = gl.maximum(1, gl.cdiv(own_last - first_key, BLOCK_K))
            for _ in range(n_tiles - mine):
                stage = n % STAGES
                phase = n // STAGES & 1
                mbarrier.wait(k_full.index(stage), phase)
                if PING_PONG:
                    _take_turn(turns, n, WHICH)
                    _pass_turn(turns, WHICH, CONSUMERS)
                mbarrier.arrive(k_empty.index(stage), count=1)
                mbarrier.wait(v_full.index(stage), phase)
                mbarrier.arrive(v_empty.index(stage), count=1)
                n += 1

        mbarrier.wait(q_full.index(WHICH), turn & 1)
        stage = n % STAGES
        phase = n // STAGES & 1
        mbarrier.wait(k_full.index(stage), phase)
        k = k_smem.index(stage).reshape([BLOCK_K, HEAD_DIM]).permute((1, 0))
        zero = gl.zeros([ROWS, BLOCK_K], gl.float32, s_layout)
        if PING_PONG:
            _take_turn(turns, n, WHICH)
        s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
        if PING_PONG:
            _pass_turn(turns, WHICH, CONSUMERS)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(stage), count=1)
        if MASKED:
            keys = first_key + (mine - 1) * BLOCK_K + gl.arange(
                0, BLOCK_K, gl.SliceLayout(0, s_layout)
            )
            visible = (keys < n_keys)[None, :]
            if IS_CAUSAL:
                queries = first_query + gl.arange(0, ROWS, row_layout)
                visible = visible & (keys[None, :] <= queries[:, None])
            # Scaled first: where the scale is zero, -inf * 0 would be NaN.
            s = gl.where(visible, s * scale_log2e, float("-inf"))
            m = gl.maximum(gl.max(s, 1), FLOOR)
            p32 = gl.exp2(s - m[:, None])
        else:
            m = gl.max(s, 1) * scale_log2e
            p32 = gl.exp2(s * scale_log2e - m[:, None])
        total = gl.sum(p32, 1)
        o = gl.zeros([ROWS, HEAD_DIM], gl.float32, o_layout)
        mbarrier.wait(v_full.index(stage), phase)

        for _ in range(mine - 1):
            p = gl.convert_layout(p32.to(dtype), p_layout, assert_trivial=True)
            v_stage = stage
            n += 1
            stage = n % STAGES
            phase = n // STAGES & 1
            mbarrier.wait(k_full.index(stage), phase)
            k = k_smem.index(stage).reshape([BLOCK_K, HEAD_DIM]).permute((1, 0))
            v = v_smem.index(v_stage).reshape([BLOCK_K, HEAD_DIM])
            if PING_PONG:
                _take_turn(turns, n, WHICH)
            s_token = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
            o_token = warpgroup_mma(p, v, o, is_async=True)
            if PING_PONG:
                _pass_turn(turns, WHICH, CONSUMERS)
            s = warpgroup_mma_wait(1, deps=[s_token])
            mbarrier.arrive(k_empty.index(stage), count=1)
            m_new = gl.maximum(m, gl.max(s, 1) * scale_log2e)
            p32 = gl.exp2(s * scale_log2e - m_new[:, None])
            correction = gl.exp2(m - m_new)
            total = total * correction + gl.sum(p32, 1)
            m = m_new
            mbarrier.wait(v_full.index(stage), phase)
            o, p = warpgroup_mma_wait(0, deps=[o_token, p])
            mbarrier.arrive(v_empty.index(v_stage), count=1)
            o = o * gl.convert_layout(correction, out_row_layout, assert_trivial=True)[:, None]

        mbarrier.arrive(q_empty.index(WHICH), count=1)
        p = gl.convert_layout(p32.to(dtype), p_layout, assert_trivial=True)
        v = v_smem.index(stage).reshape([BLOCK_K, HEAD_DIM])
        o = warpgroup_mma(p, v, o, is_async=True)
        o, p = warpgroup_mma_wait(0, deps=[o, p])
        mbarrier.arrive(v_empty.index(stage), count=1)
        n += 1

        seen = total != 0.0
        total = gl.where(seen, total, 1.0)
        inverse = gl.convert_layout(1.0 / total, out_row_layout, assert_trivial=True)
        o = o * inverse[:, None]
        row_lse = gl.where(seen, (m + gl.log2(total)) * LN2, float("-inf"))
        if SPLIT:
            row = gl.arange(0, ROWS, out_row_layout)
            column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, o_layout))
            base = parts + ((split.to(gl.int64) * n_programs + head) * n_queries + first_query) * HEAD_DIM
            gl.store(
                base + (row[:, None] * HEAD_DIM + column[None, :]), o,
                mask=(row < n_queries - first_query)[:, None],
            )
        else:
            tma.store_wait(0)
            gl.thread_barrier()
            o_stage.reshape([ROWS, HEAD_DIM]).store(o.to(dtype))
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(
                out_desc, [head // n_heads, head % n_heads, first_query, 0], o_stage
            )
        queries = first_query + gl.arange(0, ROWS, row_layout)
        rows = lse + (split.to(gl.int64) * n_programs + head) * n_queries
        gl.store(rows + queries, row_lse, mask=queries < n_queries)
        turn += 1
        tile = _place(turn, n_work, IS_CAUSAL)
    if not SPLIT:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_work", "n_programs", "n_heads", "n_queries", "n_keys", "keys_a_split", "group"])
def hopper_forward_kernel(
    q_desc, k_desc, v_desc, out_desc, parts, lse,
    n_work, n_programs, n_heads, n_queries, n_keys, keys_a_split, group, scale_log2e,
    CONSUMERS: gl.constexpr, BLOCK_K: gl.constexpr, HEAD_DIM: gl.constexpr,
    IS_CAUSAL: gl.constexpr, MASKED: gl.constexpr, STAGES: gl.constexpr,
    PING_PONG: gl.constexpr, SPLIT: gl.constexpr,
    REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, HEAD_DIM], q_desc.layout)
    o_smem = gl.allocate_shared_memory(dtype, [CONSUMERS, 1, 1, ROWS, HEAD_DIM], out_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_K, HEAD_DIM], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, BLOCK_K, HEAD_DIM], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(turns.index(i), count=1)
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    fence_async_shared()

    common = (
        out_desc, parts, lse, q_smem, k_smem, v_smem, o_smem,
        q_full, q_empty, k_full, k_empty, v_full, v_empty, turns,
        n_work, n_programs, n_heads, n_queries, n_keys, keys_a_split, group, scale_log2e,
    )
    producer = (
        q_desc, k_desc, v_desc, q_smem, k_smem, v_smem,
        q_full, q_empty, k_full, k_empty, v_full, v_empty,
        n_work, n_programs, n_heads, n_queries, n_keys, keys_a_split, group,
    )
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (_consumer, (common, gl.constexpr(0), CONSUMERS, BLOCK_K, HEAD_DIM, IS_CAUSAL, MASKED, STAGES, PING_PONG, SPLIT)),
                (_consumer, (common, gl.constexpr(1), CONSUMERS, BLOCK_K, HEAD_DIM, IS_CAUSAL, MASKED, STAGES, PING_PONG, SPLIT)),
                (_producer, (producer, CONSUMERS, BLOCK_K, IS_CAUSAL, STAGES)),
            ],
            [4, 1], [REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (common, gl.constexpr(0), CONSUMERS, BLOCK_K, HEAD_DIM, IS_CAUSAL, MASKED, STAGES, PING_PONG, SPLIT)),
                (_consumer, (common, gl.constexpr(1), CONSUMERS, BLOCK_K, HEAD_DIM, IS_CAUSAL, MASKED, STAGES, PING_PONG, SPLIT)),
                (_consumer, (common, gl.constexpr(2), CONSUMERS, BLOCK_K, HEAD_DIM, IS_CAUSAL, MASKED, STAGES, PING_PONG, SPLIT)),
                (_producer, (producer, CONSUMERS, BLOCK_K, IS_CAUSAL, STAGES)),
            ],
            [4, 4, 1], [REGISTERS, REGISTERS, PRODUCER_REGISTERS],
        )
