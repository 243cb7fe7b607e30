"""Warp-specialized backward pass of FlashAttention for Hopper and head_dim 136 to 192, in Gluon.

The module `backward.d64` describes the formulas and the backward pass for head_dim 64. The
module `backward.work` describes work items and steps, and `backward.rings` how rings of slots in
shared memory work.

A work item has 64 keys. dK and dV of 64 keys and 192 columns take 192 registers per thread of one
warpgroup, so two consumer warpgroups share them. Consumer P computes the probabilities P and dV.
Consumer DS computes dS and dK. Each of them passes its matrix to the other through shared memory.
The matmuls of dQ are divided so that both consumers have about equal numbers of them:

    consumer P     S^T    P^T (exponentials)       dV    columns 0 to 63 of dQ
    consumer DS    dP^T   dS^T = P^T * (dP^T - D)  dK    columns 64 to 191 of dQ

dQ of a tile is computed one step after dS of this tile. A consumer therefore rarely waits for the
other one, and the exponentials of consumer P overlap the matmuls of consumer DS.

Tiles in shared memory have three boxes of 64 columns, which TMA loads separately. If the tensors
have fewer columns, TMA fills the last box with zeros. The number of columns of a tile in Gluon is a
power of two, so a tile is addressed as one of 256 columns, of which the kernel does not use the
last 64 (see `_tile`).

A program processes only one work item. The data in shared memory are:

    content                           written by     read by              slots
    K, V of the work item             producer       consumers            1, filled once
    Q, lse                            producer       consumers            2
    dO, -delta                        producer       consumers            2
    P^T of a tile, float32            consumer P     consumer DS          2
    dS^T of a tile                    consumer DS    consumers            2
    64 columns of dQ^T                a consumer     TMA                  1 for each consumer

At the end, the buffer of dQ^T holds parts of dV or dK, and TMA copies them to global memory. If the
queries are split into ranges, the consumers instead store float32 partial results without TMA. They
also store dK and dV of packed sequences without it.
"""

# Kernel arguments have Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

# No `from __future__ import annotations`: an aggregate needs the types of its fields, not strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from systems.kernels.flash_attention.hopper.backward.rings import (
    add_dq,
    barriers,
    copy,
    row_of,
)
from systems.kernels.flash_attention.hopper.backward.scores import (
    add_times,
    probabilities,
    times,
)
from systems.kernels.flash_attention.hopper.backward.work import (
    BLOCK_Q,
    BackwardProblem,
    row_before,
)
from systems.kernels.flash_attention.hopper.column_parts import (
    add_product,
    operands,
    scale_all,
    store_to_rows,
    zeros,
)
from systems.kernels.flash_attention.hopper.registers import in_elements

KEYS = gl.constexpr(64)  # number of keys of a work item
COLUMNS = gl.constexpr(192)
BOX = gl.constexpr(64)  # number of columns that a TMA copy loads
BOXES = gl.constexpr(3)
TILE = gl.constexpr(256)  # number of columns with which a tile of 192 is addressed
DQ_COLUMNS = gl.constexpr(256)  # number of rows of dQ^T for each tile in the sum of dQ
SLOTS = gl.constexpr(2)
# Registers per thread, as in `backward.d128`
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)


@aggregate
class Shared:
    """Tiles in shared memory and their mbarriers.

    The first dimension of q and do is three times the slot, that of k and v the box, that of dq the
    index of the consumer, and that of the other fields the slot.
    """

    k: gl.shared_memory_descriptor  # (3, 64, 64)
    v: gl.shared_memory_descriptor  # as k
    q: gl.shared_memory_descriptor  # (3 * slots, 64, 64)
    do: gl.shared_memory_descriptor  # as q
    lse: gl.shared_memory_descriptor  # float32 (slots, 64), in base 2
    minus_delta: gl.shared_memory_descriptor  # float32 (slots, 64)
    p: gl.shared_memory_descriptor  # float32 (slots, 32, 32, 4), see `_store_p`
    ds: gl.shared_memory_descriptor  # (slots, 64 keys, 64 queries)
    dq: gl.shared_memory_descriptor  # float32 (2, 64, 64), see `backward.rings.add_dq`
    k_full: gl.shared_memory_descriptor  # (1)
    v_full: gl.shared_memory_descriptor  # (1)
    q_full: gl.shared_memory_descriptor  # (slots), for q and lse
    q_empty: gl.shared_memory_descriptor  # (slots)
    do_full: gl.shared_memory_descriptor  # (slots), for do and minus_delta
    do_empty: gl.shared_memory_descriptor  # (slots)
    p_full: gl.shared_memory_descriptor  # (slots)
    p_empty: gl.shared_memory_descriptor  # (slots)
    ds_full: gl.shared_memory_descriptor  # (slots)
    ds_empty: gl.shared_memory_descriptor  # (slots)

    @gluon.constexpr_function
    def __init__(
        self, k, v, q, do, lse, minus_delta, p, ds, dq, k_full, v_full, q_full, q_empty, do_full,
        do_empty, p_full, p_empty, ds_full, ds_empty,
    ):  # fmt: skip
        self.k = k
        self.v = v
        self.q = q
        self.do = do
        self.lse = lse
        self.minus_delta = minus_delta
        self.p = p
        self.ds = ds
        self.dq = dq
        self.k_full = k_full
        self.v_full = v_full
        self.q_full = q_full
        self.q_empty = q_empty
        self.do_full = do_full
        self.do_empty = do_empty
        self.p_full = p_full
        self.p_empty = p_empty
        self.ds_full = ds_full
        self.ds_empty = ds_empty


@gluon.jit
def _allocate(k_desc, lse_desc, dq_desc):
    """Allocate the tiles in shared memory and their mbarriers, and return `Shared`."""
    dtype: gl.constexpr = k_desc.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BOX], dtype)
    of_p: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    return Shared(
        gl.allocate_shared_memory(dtype, [BOXES, KEYS, BOX], layout),
        gl.allocate_shared_memory(dtype, [BOXES, KEYS, BOX], layout),
        gl.allocate_shared_memory(dtype, [BOXES * SLOTS, BLOCK_Q, BOX], layout),
        gl.allocate_shared_memory(dtype, [BOXES * SLOTS, BLOCK_Q, BOX], layout),
        gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK_Q], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK_Q], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [SLOTS, 32, 32, 4], of_p),
        gl.allocate_shared_memory(dtype, [SLOTS, KEYS, BLOCK_Q], layout),
        gl.allocate_shared_memory(gl.float32, [2, BOX, BLOCK_Q], dq_desc.layout),
        barriers(1, 1),
        barriers(1, 1),
        barriers(SLOTS, 1),
        barriers(SLOTS, 2),
        barriers(SLOTS, 1),
        barriers(SLOTS, 2),
        barriers(SLOTS, 1),
        barriers(SLOTS, 1),
        barriers(SLOTS, 1),
        barriers(SLOTS, 2),
    )


@gluon.jit
def _tile(boxes, first):
    """Return the tile that starts with box `first`, as (64, 256). The last 64 columns are not its.

    In a swizzled tile, each 64 columns are contiguous, as in a box of their own.
    """
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, TILE], boxes.dtype)
    return boxes.index(first)._reinterpret(boxes.dtype, [64, TILE], layout)


@gluon.jit
def _copy_boxes(desc, batch, head, row, barrier, boxes, first):
    """Load a tile into the boxes from `first` on by TMA, asynchronously."""
    for box in gl.static_range(BOXES):
        copy(desc, [batch, head, row, box * BOX], barrier, boxes.index(first + box))


@gluon.jit
def _produce(shared, problem, q_desc, do_desc, k_desc, v_desc, lse_desc, minus_delta_desc):
    """Load the tensors of the work item into shared memory. The producer warp runs this."""
    if problem.PACKED:  # noqa: SIM102 (a constant)
        # The grid has room for more blocks than there may be.
        if gl.program_id(0) >= problem.n_items:
            return
    tile_bytes: gl.constexpr = BOXES * k_desc.block_type.nbytes
    row_bytes: gl.constexpr = BLOCK_Q * 4
    item = problem.locate(gl.program_id(0))
    batch = item.head // problem.n_heads
    head = item.head % problem.n_heads
    key = item.key_start + item.first_key
    mbarrier.expect(shared.k_full.index(0), tile_bytes)
    _copy_boxes(k_desc, batch, head, key, shared.k_full.index(0), shared.k, 0)
    for which in range(problem.Q_PER_KV):
        q_head = head * problem.Q_PER_KV + which
        before = (item.head * problem.Q_PER_KV + which) * problem.n_padded
        for i in range(item.n_tiles):
            step = which * item.n_tiles + i
            slot = step % SLOTS
            empty_phase = (step // SLOTS) & 1 ^ 1
            row = item.tile(i) * BLOCK_Q
            padded_row = before + item.padded_query_start + row
            row += item.query_start
            q_full = shared.q_full.index(slot)
            mbarrier.wait(shared.q_empty.index(slot), empty_phase)
            mbarrier.expect(q_full, tile_bytes + row_bytes)
            _copy_boxes(q_desc, batch, q_head, row, q_full, shared.q, slot * BOXES)
            copy(lse_desc, [padded_row], q_full, shared.lse.index(slot))
            if step == 0:  # V is needed after the first queries
                mbarrier.expect(shared.v_full.index(0), tile_bytes)
                _copy_boxes(v_desc, batch, head, key, shared.v_full.index(0), shared.v, 0)
            do_full = shared.do_full.index(slot)
            mbarrier.wait(shared.do_empty.index(slot), empty_phase)
            mbarrier.expect(do_full, tile_bytes + row_bytes)
            _copy_boxes(do_desc, batch, q_head, row, do_full, shared.do, slot * BOXES)
            copy(minus_delta_desc, [padded_row], do_full, shared.minus_delta.index(slot))


@gluon.jit
def _store_p(p, shared):
    """Store P^T in shared memory for consumer DS.

    Each thread stores four values at a time, next to those of the other threads of its warp. In the
    result of a WGMMA, the bits of the index of a row are (warp, 2 bits), (half, 1), (thread, 3),
    and those of a column (group, 2), (part, 1), (thread, 2), (value, 1). The order in memory is
    warp, half, group, the two parts of the thread, part, value.

    Args:
        p: float32 (64 keys, 64 queries), in registers.
        shared: a slot of P, (32, 32, 4).
    """
    bits = p.reshape([4, 2, 8, 4, 2, 4, 2]).permute((0, 1, 3, 2, 5, 4, 6))
    shared.store(bits.reshape([32, 32, 4]))


@gluon.jit
def _load_p(shared, layout: gl.constexpr):
    """Load P^T that `_store_p` has stored. Each thread loads what the same thread of P stored.

    Args:
        layout: register layout of a result of a WGMMA, which the result has.
    """
    loaded: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0], [0, 16, 0]],
        [[8, 0, 0], [16, 0, 0]], [], [32, 32, 4],
    )  # fmt: skip
    bits = shared.load(loaded).reshape([4, 2, 4, 8, 4, 2, 2]).permute((0, 1, 3, 2, 5, 4, 6))
    return gl.convert_layout(bits.reshape([KEYS, BLOCK_Q]), layout, assert_trivial=True)


@gluon.jit
def _begin_dq(shared, slot, zero, layout: gl.constexpr, PART: gl.constexpr):
    """Issue the WGMMA that computes 64 columns of dQ from a slot of dS^T, as dQ^T.

    The function returns dQ^T, float32 (64, 64). The caller must wait for the WGMMA before it uses
    dQ^T, or releases the slot.

    Args:
        zero: the number 0, see `_step_of_p`.
        layout: register layout of the result.
        PART: index of the 64 columns, 0 to 2.
    """
    none = gl.zeros([BOX, BLOCK_Q], gl.float32, layout)
    kt = shared.k.index(zero + PART).permute((1, 0))
    return warpgroup_mma(kt, shared.ds.index(slot), none, use_acc=False, is_async=True)


@gluon.jit
def _add(shared, dq_desc, dq, row, WHICH: gl.constexpr):
    """Add 64 columns of dQ^T to global memory by TMA, asynchronously, at `row` of dq_desc.

    Args:
        WHICH: index of this consumer, which selects the buffer in shared memory.
    """
    tma.store_wait(pendings=0)  # until TMA has read the previous columns from this buffer
    add_dq(dq_desc, dq, row, shared.dq.index(WHICH))


@gluon.jit
def _step_of_p(shared, dq_desc, problem, item, i, dv, first_query, row, MASKED: gl.constexpr):
    """Compute P of tile i, add its contribution to dv, and add a part of dQ of tile i - 1.

    A tile consists of 64 queries. Consumer P calls this function in each step of a work item.

    Args:
        shared: `Shared`.
        dq_desc: TMA descriptor of the float32 sum of dQ in global memory.
        problem, item: `BackwardProblem` and `WorkItem`.
        i: number of tiles of the work item before this one, over all heads of q.
        dv: gradient of the 64 values, summed over the earlier tiles, see `column_parts`.
        first_query: index of the first query of tile i.
        row: row of dq_desc at which dQ^T of tile i - 1 starts.
        MASKED: whether tile i needs a mask, because some of its queries do not see all keys, or
            because keys are past the end.

    Returns:
        dv: sum that includes tile i.
    """
    dtype: gl.constexpr = shared.q.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    slot = i % SLOTS
    phase = (i // SLOTS) & 1
    before = (i + SLOTS - 1) % SLOTS  # slot of tile i - 1
    # Always 0, but not a constant for the compiler, as in `backward.d128`
    zero = first_query >> 30

    mbarrier.wait(shared.q_full.index(slot), phase)
    s = times(_tile(shared.k, zero), _tile(shared.q, slot * BOXES), layout, COLUMNS)
    mbarrier.wait(shared.ds_full.index(before), ((i + SLOTS - 1) // SLOTS + 1) & 1, pred=i > 0)
    dq = _begin_dq(shared, before, zero, layout, 0)
    lse = row_of(shared.lse.index(slot), layout)
    s = warpgroup_mma_wait(1, deps=[s])  # dQ^T stays in flight
    mbarrier.arrive(shared.q_empty.index(slot), count=1)
    p, weighted = probabilities(s, lse, problem, item, item.first_key, first_query, MASKED)
    mbarrier.wait(shared.p_empty.index(slot), phase ^ 1)
    _store_p(weighted, shared.p.index(slot))
    mbarrier.arrive(shared.p_full.index(slot), count=1)
    p16 = operands(p.to(dtype), TILE, True)
    mbarrier.wait(shared.do_full.index(slot), phase)
    dv = add_product(p16, _tile(shared.do, slot * BOXES), dv, True)
    dq = warpgroup_mma_wait(2, deps=[dq])  # the two WGMMAs of dV stay in flight
    mbarrier.arrive(shared.ds_empty.index(before), count=1, pred=i > 0)
    if i > 0:
        _add(shared, dq_desc, dq, row, 0)
    low, high, _, _ = warpgroup_mma_wait(0, deps=[dv[0], dv[1], p16[0], p16[1]])
    mbarrier.arrive(shared.do_empty.index(slot), count=1)
    return low, high


@gluon.jit
def _step_of_ds(shared, dq_desc, i, dk, zero, row):
    """Compute dS of tile i, add its contribution to dk, and add the rest of dQ of tile i - 1.

    Consumer DS calls this function in each step of a work item.

    Args:
        dk: gradient of the 64 keys, summed over the earlier tiles, see `column_parts`. It is not
            yet multiplied by the scale.
        zero: the number 0, see `_step_of_p`, which also describes the other arguments.

    Returns:
        dk: sum that includes tile i.
    """
    dtype: gl.constexpr = shared.q.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    slot = i % SLOTS
    phase = (i // SLOTS) & 1
    before = (i + SLOTS - 1) % SLOTS  # slot of tile i - 1

    mbarrier.wait(shared.do_full.index(slot), phase)
    # Compute dP^T - delta: the accumulator of dP^T starts at -delta, as in `backward.d128`.
    minus_delta = row_of(shared.minus_delta.index(slot), layout)
    none = gl.zeros([KEYS, BLOCK_Q], gl.float32, layout)
    dp, _ = gl.broadcast(minus_delta[None, :], none)
    dp = add_times(_tile(shared.v, zero), _tile(shared.do, slot * BOXES), dp, COLUMNS)
    dq = _begin_dq(shared, before, zero, layout, 1)
    dp = warpgroup_mma_wait(1, deps=[dp])  # dQ^T stays in flight
    mbarrier.arrive(shared.do_empty.index(slot), count=1)
    mbarrier.wait(shared.p_full.index(slot), phase)
    ds = (_load_p(shared.p.index(slot), layout) * dp).to(dtype)
    mbarrier.arrive(shared.p_empty.index(slot), count=1)
    ds16 = operands(ds, TILE, True)
    # Both consumers have computed dQ^T of tile i - 2 from this slot.
    mbarrier.wait(shared.ds_empty.index(slot), phase ^ 1)
    shared.ds.index(slot).store(ds)
    fence_async_shared()
    mbarrier.arrive(shared.ds_full.index(slot), count=1)
    mbarrier.wait(shared.q_full.index(slot), phase)
    dk = add_product(ds16, _tile(shared.q, slot * BOXES), dk, True)
    dq = warpgroup_mma_wait(2, deps=[dq])  # the two WGMMAs of dK stay in flight
    if i > 0:
        _add(shared, dq_desc, dq, row + BOX, 1)
    dq = _begin_dq(shared, before, zero, layout, 2)
    low, high, _, _ = warpgroup_mma_wait(1, deps=[dk[0], dk[1], ds16[0], ds16[1]])
    mbarrier.arrive(shared.q_empty.index(slot), count=1)
    dq = warpgroup_mma_wait(0, deps=[dq])
    mbarrier.arrive(shared.ds_empty.index(before), count=1, pred=i > 0)
    if i > 0:
        _add(shared, dq_desc, dq, row + 2 * BOX, 1)
    return low, high


@gluon.jit
def _send(desc, batch, head, row, sums, buffer):
    """Store dK or dV of 64 keys to global memory by TMA, and wait until TMA has read the buffer.

    Args:
        desc: TMA descriptor of the tensor in global memory, with tiles of (1, 1, 64, 128).
        sums: dK or dV, see `column_parts`. The tensor must not have further columns.
        buffer: buffer in shared memory, float32 (64, 64).
    """
    half: gl.constexpr = desc.block_type.shape[3]
    tile = buffer._reinterpret(desc.dtype, desc.block_type.shape, desc.layout)
    columns = tile.reshape([KEYS, half])
    tma.store_wait(pendings=0)
    columns.store(sums[0].to(desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [batch, head, row, 0], tile)
    tma.store_wait(pendings=0)
    columns.slice(0, BOX, 1).store(sums[1].to(desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [batch, head, row, half], tile)
    tma.store_wait(pendings=0)


@gluon.jit
def _consume(
    shared, problem, dq_desc, desc, target, target_split, target_batch, target_head, target_row,
    factor, COMPUTES_P: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Compute dV and a part of dQ if COMPUTES_P is True, otherwise dK and the rest of dQ.

    Args:
        desc, target, target_split, target_batch, target_head, target_row: TMA descriptor, address
            and strides of dV or dK.
        factor: dV or dK is multiplied by it at the end.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    if problem.PACKED:  # noqa: SIM102 (a constant)
        if gl.program_id(0) >= problem.n_items:
            return
    item = problem.locate(gl.program_id(0))
    sums = zeros(TILE, True)
    tiles_per_head = problem.n_padded // BLOCK_Q
    # Row of dQ^T for tile 0 of the first head of q
    row = item.head * problem.Q_PER_KV * tiles_per_head + item.padded_query_start // BLOCK_Q
    row = row * DQ_COLUMNS
    mbarrier.wait(shared.k_full.index(0), 0)
    if not COMPUTES_P:
        mbarrier.wait(shared.v_full.index(0), 0)
    for which in range(problem.Q_PER_KV):
        before = which * item.n_tiles  # number of steps for earlier heads of q
        head_row = row + which * tiles_per_head * DQ_COLUMNS
        if COMPUTES_P:
            for i in range(item.n_first()):
                sums = _step_of_p(
                    shared, dq_desc, problem, item, before + i, sums, item.tile(i) * BLOCK_Q,
                    row_before(problem, item, head_row, i, DQ_COLUMNS), True,
                )  # fmt: skip
            for i in range(item.n_first(), item.n_tiles):
                sums = _step_of_p(
                    shared, dq_desc, problem, item, before + i, sums, item.tile(i) * BLOCK_Q,
                    row_before(problem, item, head_row, i, DQ_COLUMNS), False,
                )  # fmt: skip
        else:
            for i in range(item.n_tiles):
                tile_row = row_before(problem, item, head_row, i, DQ_COLUMNS)
                sums = _step_of_ds(shared, dq_desc, before + i, sums, (before + i) >> 30, tile_row)
    n = problem.Q_PER_KV * item.n_tiles
    last = (n - 1) % SLOTS  # slot of the last tile
    last_tile = item.tile(item.n_tiles - 1)
    row += ((problem.Q_PER_KV - 1) * tiles_per_head + last_tile) * DQ_COLUMNS
    if COMPUTES_P:
        mbarrier.wait(shared.ds_full.index(last), ((n - 1) // SLOTS) & 1)
        dq = warpgroup_mma_wait(0, deps=[_begin_dq(shared, last, 0, layout, 0)])
        _add(shared, dq_desc, dq, row, 0)
    else:
        for part in gl.static_range(1, BOXES):
            dq = warpgroup_mma_wait(0, deps=[_begin_dq(shared, last, 0, layout, part)])
            _add(shared, dq_desc, dq, row + part * BOX, 1)
    batch = item.head // problem.n_heads
    head = item.head % problem.n_heads
    key_row = item.key_start + item.first_key
    sums = scale_all(sums, factor, True)
    if SPLIT or problem.PACKED:
        # TMA would also write to the first rows of the next packed sequence.
        base = target + item.split * in_elements(target_split)
        base += batch * in_elements(target_batch) + head * in_elements(target_head)
        n_rows = item.key_start + item.n_keys
        store_to_rows(base, sums, key_row, n_rows, in_elements(target_row), COLUMNS, True)
    else:
        _send(desc, batch, head, key_row, sums, shared.dq.index(0 if COMPUTES_P else 1))
    tma.store_wait(pendings=0)


@gluon.jit(
    do_not_specialize=[
        "n_programs", "n_heads", "n_queries", "n_keys", "n_padded", "n_splits", "queries_per_split",
        "group", "n_items", "left", "right", "dk_split", "dk_batch", "dk_head", "dk_row",
        "dv_split", "dv_batch", "dv_head", "dv_row",
    ]
)  # fmt: skip
def d192_backward_kernel(
    q_desc, do_desc, k_desc, v_desc, lse_desc, minus_delta_desc, dq_desc, dk_desc, dv_desc,
    counter, turns, dkey, dvalue, starts_q, starts_k, blocks,
    dk_split, dk_batch, dk_head, dk_row, dv_split, dv_batch, dv_head, dv_row,
    n_programs, n_heads, n_queries, n_keys, n_padded, n_splits, queries_per_split, group, n_items,
    left, right, scale, scale_log2e, cap_log2e,
    IS_CAUSAL: gl.constexpr, BOUNDED: gl.constexpr, LOWER_RIGHT: gl.constexpr,
    PACKED: gl.constexpr, SOFTCAP: gl.constexpr, SPLIT: gl.constexpr, Q_PER_KV: gl.constexpr,
    DETERMINISTIC: gl.constexpr,
):  # fmt: skip
    """Compute dQ, dK and dV with one warp-specialized program per work item.

    A work item is a block of 64 keys of one head, with the queries that see these keys. The
    arguments that are not listed below are those of `backward.d128.d128_backward_kernel`. Their
    head_dim is 192 here instead of 128. The tensors of the TMA descriptors may have fewer columns,
    136 or more. With SPLIT or PACKED, they must have 192.

    Args:
        q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc: TMA descriptors, with tiles of 64 rows.
            The tiles of q, k, v and dO have 64 columns, those of dK and dV have 128.
        dq_desc: TMA descriptor of float32 (batch * q_heads * n_padded * 4, 64), with tiles of (64,
            64). It must be zeros. The kernel adds dQ / scale to it, as one transposed tile (192,
            64) in each 256 rows.
        turns: not used.
        DETERMINISTIC: must be False. Additions to dQ have no fixed order.
    """
    gl.static_assert(not DETERMINISTIC)
    if not SPLIT:
        n_splits = gl.to_tensor(1)  # a constant, so that the compiler removes divisions by it
    if PACKED:
        n_items = gl.load(blocks) * n_heads
    problem = BackwardProblem(
        n_programs, n_heads, n_queries, n_keys, n_padded, n_splits, queries_per_split, group,
        n_items, left, right, starts_q, starts_k, blocks, scale_log2e, cap_log2e, turns, IS_CAUSAL,
        BOUNDED, LOWER_RIGHT, PACKED, SOFTCAP, Q_PER_KV, DETERMINISTIC, KEYS,
    )  # fmt: skip
    shared = _allocate(k_desc, lse_desc, dq_desc)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (shared, problem, dq_desc, dv_desc, dvalue,
                        dv_split, dv_batch, dv_head, dv_row, 1.0, gl.constexpr(True), SPLIT)),
            (_consume, (shared, problem, dq_desc, dk_desc, dkey,
                        dk_split, dk_batch, dk_head, dk_row, scale, gl.constexpr(False), SPLIT)),
            (_produce, (shared, problem,
                        q_desc, do_desc, k_desc, v_desc, lse_desc, minus_delta_desc)),
        ],
        [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
