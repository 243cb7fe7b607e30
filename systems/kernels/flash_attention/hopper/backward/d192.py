"""Warp-specialized backward pass of FlashAttention for Hopper and head_dim 136 to 192, in Gluon.

The module `backward.d64` describes the formulas and the backward pass for head_dim 64. The module
`backward.work` describes work items and steps, and `backward.rings` how rings of slots in shared
memory work. Float16, packed sequences, a softcap, another head_dim of V and splits of the queries
are left to `backward.d256`.

A work item has 96 keys. Each work item adds a float32 tile of dQ to global memory for each tile of
queries. With 64 keys, there would be 1.5 times as many additions, and they would limit the speed.

Consumer P computes the probabilities P and dV. Consumer DS computes dS and dK. dV of 96 keys and
192 columns takes 144 of the 240 registers of each thread of consumer P, and so does dK in consumer
DS. Each consumer passes its matrix to the other one through shared memory. They share the work of
dQ, so that both have about equally many matmuls. The work of step i, in this order:

    consumer P     S(i)     P = exponentials of S    columns 0 to 63 of dQ(i - 1)    dV(i)
    consumer DS    dP(i)    dS = P (dP - delta)      columns 64 to 191 of dQ(i)      dK(i)

Consumer P waits for most of dV(i) only in the next step, after it has issued S(i + 1). Its
exponentials overlap the matmuls of consumer DS.

WGMMAs compute 64 rows each, and 96 is not a multiple of 64. So the kernel computes dK^T = Q^T dS
and dV^T = dO^T P, which have 192 rows. P and dS have a row per query. P is rounded to bfloat16
before it is multiplied by dP - delta. The relative errors of dQ and dK are therefore 1.22 times
those of `backward.d256` (records of flash_features).

The keys are divided into a wide part of 64 and a narrow part of 32 keys, and the columns into three
boxes of 64 columns (see `backward.d192_tiles`). The WGMMAs of both parts have the same left operand
and would read it from shared memory twice. Reads of shared memory limit the speed, so some boxes
are loaded into registers first: two of dO for dP, and one each of Q and dO for dK and dV. There are
no registers for more. In trials on two H100s, backward took 0.94 to 0.99 times as long as without
these loads.

A program processes only one work item. The data in shared memory are:

    content                           written by     read by              slots
    K of the work item                producer       consumers            1, filled once
    V of the work item                producer       consumer DS          1, filled once
    Q                                 producer       consumers            2
    dO                                producer       consumers            2
    lse                               producer       consumer P           2
    -delta                            producer       consumer DS          2
    P of a tile                       consumer P     consumers            1
    dS of a tile                      consumer DS    consumers            1
    64 columns of dQ^T                a consumer     TMA                  1 for each consumer

At the end, the buffer of dQ^T holds parts of dV or dK, and TMA copies them to global memory.
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

from systems.kernels.flash_attention.hopper.backward.d192_tiles import (
    BOX,
    BOXES,
    NARROW,
    SLOTS,
    WIDE,
    allocate,
    copies_in,
    copy_keys,
    copy_queries,
    keys_of_box,
)
from systems.kernels.flash_attention.hopper.backward.rings import add_dq
from systems.kernels.flash_attention.hopper.backward.scores import hide
from systems.kernels.flash_attention.hopper.backward.sums import (
    is_last_item,
    sum_of_items,
    sums_of_values,
)
from systems.kernels.flash_attention.hopper.backward.work import (
    BLOCK_Q,
    BackwardProblem,
    row_before,
)
from systems.kernels.flash_attention.hopper.gluon_names import async_store, barrier, reinterpret

KEYS = gl.constexpr(96)  # number of keys of a work item
COLUMNS = gl.constexpr(192)
# Register layouts of the results of WGMMAs, for a wide part and a narrow part
WIDE_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
NARROW_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
# Registers per thread, as in `backward.d128`
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)


@gluon.jit
def _produce(shared, problem, q_desc, do_desc, k_desc, v_desc, lse_desc, minus_delta_desc):
    """Load the tensors of the work item into shared memory. The producer warp runs this."""
    item = problem.locate(gl.program_id(0))
    batch = item.head // problem.n_heads
    head = item.head % problem.n_heads
    key = item.first_key
    kv_head = head // problem.ITEMS_PER_KV
    copy_keys(k_desc, batch, kv_head, key, shared.k_full.index(0), shared.k_wide, shared.k_narrow)
    for which in range(problem.Q_PER_ITEM):
        q_head = head * problem.Q_PER_ITEM + which
        before = (item.head * problem.Q_PER_ITEM + which) * problem.n_padded
        for i in range(item.n_tiles):
            step = which * item.n_tiles + i
            slot = step % SLOTS
            phase = (step // SLOTS) & 1 ^ 1
            row = item.tile(i) * BLOCK_Q
            mbarrier.wait(shared.q_empty.index(slot), phase)
            copy_queries(
                q_desc, lse_desc, batch, q_head, row, before + row, shared.q_full.index(slot),
                shared.q, slot, shared.lse,
            )  # fmt: skip
            if step == 0:  # V is needed after the first queries
                copy_keys(
                    v_desc,
                    batch,
                    kv_head,
                    key,
                    shared.v_full.index(0),
                    shared.v_wide,
                    shared.v_narrow,
                )
            mbarrier.wait(shared.do_empty.index(slot), phase)
            copy_queries(
                do_desc, minus_delta_desc, batch, q_head, row, before + row,
                shared.do_full.index(slot), shared.do, slot, shared.minus_delta,
            )  # fmt: skip


@gluon.jit
def _column_of(shared, layout: gl.constexpr):
    """Load lse or -delta of a tile of 64 queries from shared memory, one number per query.

    They are stored in the order of `backward.rings.row_of`. `layout` is that of a tile of S, with
    one row per query, and number i of the result belongs to row i.
    """
    loaded: gl.constexpr = gl.DistributedLinearLayout(
        [[2]], [[0], [0], [1], [4], [8]], [[16], [32]], [], [BLOCK_Q]
    )
    row = shared.load(loaded).reshape([BLOCK_Q // 16, 4, 2, 2]).permute((0, 2, 1, 3))
    return gl.convert_layout(row.reshape([BLOCK_Q]), gl.SliceLayout(1, layout), assert_trivial=True)


@gluon.jit
def _probabilities(s, lse, problem, item, first_key, first_query, MASKED: gl.constexpr):
    """Return P of a part of a tile, (queries, keys), see `backward.scores.probabilities`."""
    p = gl.exp2(s * problem.scale_log2e - lse[:, None])
    if MASKED:
        p = hide(p, problem, item, first_key, first_query, 1)
    return p


@gluon.jit
def _zeros(ROWS: gl.constexpr):
    """Return a product of zeros: a wide part (ROWS, 64) and a narrow part (ROWS, 32)."""
    wide = gl.zeros([ROWS, WIDE], gl.float32, WIDE_LAYOUT)
    narrow = gl.zeros([ROWS, NARROW], gl.float32, NARROW_LAYOUT)
    return wide, narrow


@gluon.jit
def _load_left(tile):
    """Load a tile (64, 64) from shared memory, as left operand of `_add_product`.

    The wide and the narrow part have different layouts of the same registers.
    """
    for_wide: gl.constexpr = gl.DotOperandLayout(0, WIDE_LAYOUT, 2)
    for_narrow: gl.constexpr = gl.DotOperandLayout(0, NARROW_LAYOUT, 2)
    loaded = tile.load(for_wide)
    return loaded, gl.convert_layout(loaded, for_narrow, assert_trivial=True)


@gluon.jit
def _add_product(left, right, sums, ADDS: gl.constexpr = True):
    """Issue the WGMMAs that add the product of a left and a right operand to sums.

    Each operand has a wide and a narrow part. Both parts of `left` are the same tile in shared
    memory, or the result of `_load_left`, whose registers must not change before the WGMMAs are
    complete. Without ADDS, sums are ignored, so that no registers must be set to zero. The new sums
    are valid after a wait.
    """
    wide = warpgroup_mma(left[0], right[0], sums[0], use_acc=ADDS, is_async=True)
    narrow = warpgroup_mma(left[1], right[1], sums[1], use_acc=ADDS, is_async=True)
    return wide, narrow


@gluon.jit
def _add_queries(rows, box, right, sums):
    """Issue the WGMMAs that add a box of Q or dO, transposed, times dS or P to dK^T or dV^T."""
    left = rows.index(box).permute((1, 0))
    return _add_product((left, left), right, sums)


@gluon.jit
def _scores(shared, slot, zero):
    """Issue the WGMMAs of S: all those of the wide part, then those of the narrow part.

    `slot` is that of Q. `zero` is the number 0, not as a constant, see `backward.d128`.
    """
    wide, narrow = _zeros(BLOCK_Q)
    for box in gl.static_range(BOXES):
        k, _ = keys_of_box(shared.k_wide, shared.k_narrow, zero + box)
        q = shared.q.index(slot * BOXES + box)
        wide = warpgroup_mma(q, k, wide, use_acc=box > 0, is_async=True)
    for box in gl.static_range(BOXES):
        _, k = keys_of_box(shared.k_wide, shared.k_narrow, zero + box)
        q = shared.q.index(slot * BOXES + box)
        narrow = warpgroup_mma(q, k, narrow, use_acc=box > 0, is_async=True)
    return wide, narrow


@gluon.jit
def _product_with_v(shared, slot, zero):
    """Compute dO V^T, a wide and a narrow part. `slot` is that of dO. For `zero`, see `_scores`."""
    first = slot * BOXES
    left = _load_left(shared.do.index(first))
    v = keys_of_box(shared.v_wide, shared.v_narrow, zero)
    wide, narrow = _add_product(left, v, _zeros(BLOCK_Q), False)
    middle = shared.do.index(first + 1)
    v = keys_of_box(shared.v_wide, shared.v_narrow, zero + 1)
    wide, narrow = _add_product((middle, middle), v, (wide, narrow))
    # The last box is loaded into the registers of the first one, while the middle one is used.
    wide, narrow, _, _ = warpgroup_mma_wait(2, deps=[wide, narrow, left[0], left[1]])
    left = _load_left(shared.do.index(first + 2))
    v = keys_of_box(shared.v_wide, shared.v_narrow, zero + 2)
    wide, narrow = _add_product(left, v, (wide, narrow))
    wide, narrow, _, _ = warpgroup_mma_wait(0, deps=[wide, narrow, left[0], left[1]])
    return wide, narrow


@gluon.jit
def _wait(sums, other, PENDING: gl.constexpr):
    """Wait until all WGMMAs except the last PENDING are done.

    `sums` is dK^T or dV^T, and `other` another tensor. Both are returned, and the caller may then
    use them.
    """
    a, b, c, d, e, f, other = warpgroup_mma_wait(
        PENDING,
        deps=[sums[0][0], sums[0][1], sums[1][0], sums[1][1], sums[2][0], sums[2][1], other],
    )
    return ((a, b), (c, d), (e, f)), other


@gluon.jit
def _begin_dq(shared, zero, PART: gl.constexpr):
    """Issue the two WGMMAs that compute 64 columns of dQ from dS, as dQ^T, float32 (64, 64).

    The caller must wait for the WGMMAs before it uses dQ^T, or releases dS. `zero` is the number 0,
    not as a constant, see `backward.d128`. PART is the index of the 64 columns, 0 to 2.
    """
    dq = gl.zeros([BOX, BLOCK_Q], gl.float32, WIDE_LAYOUT)
    wide, narrow = keys_of_box(shared.k_wide, shared.k_narrow, zero + PART)
    ds_wide = shared.ds_wide.index(zero).permute((1, 0))
    ds_narrow = shared.ds_narrow.index(zero).permute((1, 0))
    dq = warpgroup_mma(wide, ds_wide, dq, use_acc=False, is_async=True)
    return warpgroup_mma(narrow, ds_narrow, dq, is_async=True)


@gluon.jit
def _buffer(shared, dq_desc, WHICH: gl.constexpr):
    """Return the buffer of dQ^T of a consumer, float32 (64, 64)."""
    return reinterpret(shared.dq.index(WHICH), gl.float32, [BOX, BLOCK_Q], dq_desc.layout)


@gluon.jit
def _add(shared, dq_desc, dq, row, WHICH: gl.constexpr):
    """Add 64 columns of dQ^T to global memory by TMA, asynchronously, at `row` of dq_desc.

    WHICH is the index of this consumer, which selects the buffer in shared memory.
    """
    tma.store_wait(pendings=0)  # until TMA has read the previous columns from this buffer
    add_dq(dq_desc, dq, row, _buffer(shared, dq_desc, WHICH))


@gluon.jit
def _step_of_p(shared, dq_desc, problem, item, i, sums, first_query, row, MASKED: gl.constexpr):
    """Compute P of tile i, add its contribution to dV^T, and add a part of dQ of tile i - 1.

    The WGMMAs of `sums`, dV^T of the work item (see `_zeros`), may be in flight, also when the
    function returns. Returns the new sums. `row` is the row of dq_desc at which dQ^T of tile i - 1
    starts. For `i` and MASKED, see `_step` in `backward.d128`.
    """
    dtype: gl.constexpr = shared.q.dtype
    slot = i % SLOTS
    phase = (i // SLOTS) & 1
    # Always 0, but not a constant for the compiler, as in `backward.d128`
    zero = first_query >> 30

    mbarrier.wait(shared.q_full.index(slot), phase)
    wide, narrow = _scores(shared, slot, zero)
    lse = _column_of(shared.lse.index(slot), WIDE_LAYOUT)
    sums, wide = _wait(sums, wide, BOXES)  # the narrow part of S stays in flight
    mbarrier.arrive(shared.do_empty.index((i + 1) % SLOTS), count=1, pred=i > 0)
    mbarrier.wait(shared.p_empty.index(0), (i & 1) ^ 1)
    key = item.first_key
    p = shared.p_wide.index(zero), shared.p_narrow.index(zero)
    p_wide = _probabilities(wide, lse, problem, item, key, first_query, MASKED)
    p[0].store(p_wide.to(dtype))
    narrow = warpgroup_mma_wait(0, deps=[narrow])
    lse = gl.convert_layout(lse, gl.SliceLayout(1, NARROW_LAYOUT))
    p_narrow = _probabilities(narrow, lse, problem, item, key + WIDE, first_query, MASKED)
    p[1].store(p_narrow.to(dtype))
    mbarrier.arrive(shared.q_empty.index(slot), count=1)
    fence_async_shared()
    barrier()
    mbarrier.arrive(shared.p_full.index(0), count=1)
    mbarrier.wait(shared.ds_full.index(0), (i & 1) ^ 1, pred=i > 0)
    dq = _begin_dq(shared, zero, 0)
    mbarrier.wait(shared.do_full.index(slot), phase)
    left = _load_left(shared.do.index(slot * BOXES).permute((1, 0)))
    first = _add_product(left, p, sums[0])
    middle = _add_queries(shared.do, slot * BOXES + 1, p, sums[1])
    last = _add_queries(shared.do, slot * BOXES + 2, p, sums[2])
    dq = warpgroup_mma_wait(2 * BOXES, deps=[dq])  # dV^T stays in flight
    mbarrier.arrive(shared.ds_empty.index(0), count=1, pred=i > 0)
    if i > 0:
        _add(shared, dq_desc, dq, row, 0)
    # The next step needs the registers of the left operand. The rest of dV^T stays in flight.
    wide, narrow, _, _ = warpgroup_mma_wait(4, deps=[first[0], first[1], left[0], left[1]])
    return (wide, narrow), middle, last


@gluon.jit
def _step_of_ds(shared, dq_desc, i, sums, zero, row):
    """Compute dS of tile i, add its contribution to dK^T, and add a part of dQ of this tile.

    `sums` is dK^T of the work item (see `_zeros`), not yet multiplied by the scale. `zero` is the
    number 0, not as a constant, see `backward.d128`. `row` is the row of dq_desc at which dQ^T of
    tile i starts. For `i`, see `_step` in `backward.d128`. Returns the new sums.
    """
    dtype: gl.constexpr = shared.q.dtype
    slot = i % SLOTS
    phase = (i // SLOTS) & 1

    mbarrier.wait(shared.do_full.index(slot), phase)
    wide, narrow = _product_with_v(shared, slot, zero)
    minus_delta = shared.minus_delta.index(slot)
    # In `backward.d128`, the accumulators of dP start at -delta. Here, ptxas would then wait after
    # each WGMMA of the kernel, so -delta is added later.
    wide += _column_of(minus_delta, WIDE_LAYOUT)[:, None]
    narrow += _column_of(minus_delta, NARROW_LAYOUT)[:, None]
    mbarrier.arrive(shared.do_empty.index(slot), count=1)
    mbarrier.wait(shared.p_full.index(0), i & 1)
    ds_wide = (shared.p_wide.index(zero).load(WIDE_LAYOUT).to(gl.float32) * wide).to(dtype)
    ds_narrow = (shared.p_narrow.index(zero).load(NARROW_LAYOUT).to(gl.float32) * narrow).to(dtype)
    mbarrier.arrive(shared.p_empty.index(0), count=1)
    # until consumer P has computed dQ^T of tile i - 1 from this slot
    mbarrier.wait(shared.ds_empty.index(0), (i & 1) ^ 1, pred=i > 0)
    ds = shared.ds_wide.index(zero), shared.ds_narrow.index(zero)
    ds[0].store(ds_wide)
    ds[1].store(ds_narrow)
    fence_async_shared()
    barrier()
    mbarrier.arrive(shared.ds_full.index(0), count=1)
    dq_middle = _begin_dq(shared, zero, 1)
    dq_last = _begin_dq(shared, zero, 2)
    mbarrier.wait(shared.q_full.index(slot), phase)
    middle = _add_queries(shared.q, slot * BOXES + 1, ds, sums[1])
    last = _add_queries(shared.q, slot * BOXES + 2, ds, sums[2])
    dq_middle = warpgroup_mma_wait(6, deps=[dq_middle])  # 2 of dQ^T and 4 of dK^T stay in flight
    _add(shared, dq_desc, dq_middle, row + BOX, 1)
    left = _load_left(shared.q.index(slot * BOXES).permute((1, 0)))  # in the registers of dq_middle
    first = _add_product(left, ds, sums[0])
    dq_last = warpgroup_mma_wait(2 * BOXES, deps=[dq_last])  # dK^T stays in flight
    _add(shared, dq_desc, dq_last, row + 2 * BOX, 1)
    sums, _ = _wait((first, middle, last), left[0], 0)  # left[1] has the same registers
    mbarrier.arrive(shared.q_empty.index(slot), count=1)
    return sums


@gluon.jit
def _send_box(shared, desc, batch, head, row, column, wide, narrow, WHICH: gl.constexpr):
    """Store 64 columns of dK or dV to global memory by TMA, asynchronously.

    The tiles of `desc` are (1, 1, 32, 64), and a buffer of dQ^T has room for four. `wide` and
    `narrow` are dK^T or dV^T of the columns, float32 (64 columns, 64 or 32 keys).
    """
    dtype: gl.constexpr = desc.dtype
    swizzle: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WIDE, BOX], dtype)
    copies = copies_in(shared.dq.index(WHICH), desc, 4)
    pairs = reinterpret(shared.dq.index(WHICH), dtype, [2, WIDE, BOX], swizzle)
    tma.store_wait(pendings=0)
    pairs.index(0).permute((1, 0)).store(wide.to(dtype))
    copies.index(2).reshape([NARROW, BOX]).permute((1, 0)).store(narrow.to(dtype))
    fence_async_shared()
    barrier()
    for part in gl.static_range(3):
        async_store(desc, [batch, head, row + part * NARROW, column], copies.index(part))


@gluon.jit
def _sum_of_items(problem, item, sums, values, ADDS: gl.constexpr):
    """Add dK^T or dV^T (see `_zeros`) to the sums, or read it, see `sums.sum_of_items`."""
    key = item.first_key
    wide = (
        sum_of_items(problem, item, key, sums, COLUMNS, 0, values[0][0], 1, ADDS),
        sum_of_items(problem, item, key, sums, COLUMNS, BOX, values[1][0], 1, ADDS),
        sum_of_items(problem, item, key, sums, COLUMNS, 2 * BOX, values[2][0], 1, ADDS),
    )
    key += WIDE
    narrow = (
        sum_of_items(problem, item, key, sums, COLUMNS, 0, values[0][1], 1, ADDS),
        sum_of_items(problem, item, key, sums, COLUMNS, BOX, values[1][1], 1, ADDS),
        sum_of_items(problem, item, key, sums, COLUMNS, 2 * BOX, values[2][1], 1, ADDS),
    )
    return (wide[0], narrow[0]), (wide[1], narrow[1]), (wide[2], narrow[2])


@gluon.jit
def _consume(
    shared, problem, dq_desc, desc, factor, sums, COMPUTES_P: gl.constexpr, SUMMED: gl.constexpr
):
    """Compute dV and a part of dQ if COMPUTES_P is True, otherwise dK and the rest of dQ.

    `desc` is the TMA descriptor of dV or dK, which is multiplied by `factor` at the end.
    """
    WHICH: gl.constexpr = 0 if COMPUTES_P else 1
    item = problem.locate(gl.program_id(0))
    values = (_zeros(BOX), _zeros(BOX), _zeros(BOX))
    tiles_per_head = problem.n_padded // BLOCK_Q
    # Row of dQ^T for tile 0 of the first head of q
    row = item.head * problem.Q_PER_ITEM * tiles_per_head * COLUMNS
    mbarrier.wait(shared.k_full.index(0), 0)
    if not COMPUTES_P:
        mbarrier.wait(shared.v_full.index(0), 0)
    for which in range(problem.Q_PER_ITEM):
        before = which * item.n_tiles  # number of steps for earlier heads of q
        head_row = row + which * tiles_per_head * COLUMNS
        if COMPUTES_P:
            for i in range(item.n_first()):
                values = _step_of_p(
                    shared, dq_desc, problem, item, before + i, values, item.tile(i) * BLOCK_Q,
                    row_before(problem, item, head_row, i, COLUMNS), True,
                )  # fmt: skip
            for i in range(item.n_first(), item.n_tiles):
                values = _step_of_p(
                    shared, dq_desc, problem, item, before + i, values, item.tile(i) * BLOCK_Q,
                    row_before(problem, item, head_row, i, COLUMNS), False,
                )  # fmt: skip
        else:
            for i in range(item.n_tiles):
                values = _step_of_ds(
                    shared, dq_desc, before + i, values, (before + i) >> 30,
                    head_row + item.tile(i) * COLUMNS,
                )  # fmt: skip
    n = problem.Q_PER_ITEM * item.n_tiles
    last_tile = item.tile(item.n_tiles - 1)
    row += ((problem.Q_PER_ITEM - 1) * tiles_per_head + last_tile) * COLUMNS
    if COMPUTES_P:
        mbarrier.wait(shared.ds_full.index(0), (n - 1) & 1)
        dq = _begin_dq(shared, 0, 0)
        values, dq = _wait(values, dq, 0)
        _add(shared, dq_desc, dq, row, 0)
    batch = item.head // problem.n_heads
    head = item.head % problem.n_heads // problem.ITEMS_PER_KV
    writes = gl.to_tensor(True)
    if SUMMED:
        if COMPUTES_P:
            sums = sums_of_values(problem, sums, COLUMNS)
        _sum_of_items(problem, item, sums, values, True)
        writes = is_last_item(problem, item, item.first_key, problem.turns, WHICH)
        if writes:
            values = _sum_of_items(problem, item, sums, values, False)
    if writes:
        for box in gl.static_range(BOXES):
            _send_box(
                shared, desc, batch, head, item.first_key, box * BOX,
                values[box][0] * factor, values[box][1] * factor, WHICH,
            )  # fmt: skip
    tma.store_wait(pendings=0)


@gluon.jit(
    do_not_specialize=[
        "n_programs", "n_heads", "n_queries", "n_keys", "n_padded", "n_splits", "queries_per_split",
        "group", "n_items", "left", "right", "dk_batch", "dk_head", "dk_row", "dv_batch", "dv_head",
        "dv_row",
    ]
)  # fmt: skip
def d192_backward_kernel(
    q_desc, do_desc, k_desc, v_desc, lse_desc, minus_delta_desc, dq_desc, dk_desc, dv_desc,
    counter, turns, sums, dkey, dvalue, starts_q, starts_k, blocks,
    dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    n_programs, n_heads, n_queries, n_keys, n_padded, n_splits, queries_per_split, group, n_items,
    left, right, scale, scale_log2e, cap_log2e,
    IS_CAUSAL: gl.constexpr, BOUNDED: gl.constexpr, LOWER_RIGHT: gl.constexpr,
    PACKED: gl.constexpr, SOFTCAP: gl.constexpr, SUMMED: gl.constexpr, Q_PER_KV: gl.constexpr,
    Q_PER_ITEM: gl.constexpr, DETERMINISTIC: gl.constexpr,
):  # fmt: skip
    """Compute dQ, dK and dV with one warp-specialized program per work item.

    The arguments that are not listed below are those of `backward.d128.d128_backward_kernel`. Their
    head_dim is 192 here instead of 128, and blocks have 96 keys. The tensors of the TMA descriptors
    may have fewer columns, 136 or more.

    Args:
        q_desc, do_desc: TMA descriptors, with tiles of (1, 1, 64, 64).
        k_desc, v_desc, dk_desc, dv_desc: TMA descriptors, with tiles of (1, 1, 32, 64).
        dq_desc: TMA descriptor of float32 (batch * q_heads * n_padded * 3, 64), with tiles of (64,
            64), as in `d128_backward_kernel`. The transposed tiles of dQ / scale are (192, 64).
        PACKED, SOFTCAP, DETERMINISTIC: must be False.
    """
    gl.static_assert(not (PACKED or SOFTCAP or DETERMINISTIC))
    if not SUMMED:
        n_splits = gl.to_tensor(1)  # a constant, so that the compiler removes divisions by it
    problem = BackwardProblem(
        n_programs, n_heads, n_queries, n_keys, n_padded, n_splits, queries_per_split, group,
        n_items, left, right, starts_q, starts_k, blocks, scale_log2e, cap_log2e, turns, IS_CAUSAL,
        BOUNDED, LOWER_RIGHT, PACKED, SOFTCAP, Q_PER_KV, Q_PER_ITEM, DETERMINISTIC, KEYS,
    )  # fmt: skip
    shared = allocate(k_desc, lse_desc)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (shared, problem, dq_desc, dv_desc, 1.0, sums,
                        gl.constexpr(True), SUMMED)),
            (_consume, (shared, problem, dq_desc, dk_desc, scale, sums,
                        gl.constexpr(False), SUMMED)),
            (_produce, (shared, problem,
                        q_desc, do_desc, k_desc, v_desc, lse_desc, minus_delta_desc)),
        ],
        [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
