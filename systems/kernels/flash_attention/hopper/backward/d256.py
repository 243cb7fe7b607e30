"""Warp-specialized backward pass of FlashAttention for Hopper and head_dim 136 to 256, in Gluon.

The module `backward.d64` describes the formulas and the backward pass for head_dim 64. The
module `backward.work` describes work items and steps, and `backward.rings` how rings of slots in
shared memory work.

Tiles in shared memory have 256 columns. If the tensors have fewer columns, TMA pads the tiles with
zeros. Up to head_dim 192, the matmuls use only the first 192 columns: the first half of 128, and 64
of the second half. HIGH is the number of columns of the second half that they use. The head_dim of
V may also be 128. Tiles of V and dO then have 128 columns, and VALUE_HIGH, the number of columns of
their second half, is 0.

A work item has 64 keys. dK and dV of 64 keys with 256 columns take 128 of the 240 registers of each
thread of two consumer warpgroups, and S^T, dP^T and dQ^T most of the others. So each consumer
accumulates one half of the columns of dK and dV. It also computes this half of dQ. For all of this,
a consumer needs P and dS of all 64 keys. Both consumers compute P and dS, each for itself: this is
more work for the tensor cores, 7 matmuls instead of 5, but the consumers exchange no data. In each
step, a consumer issues its matmuls in this order:

    first 64 columns of dQ^T of tile i - 1    S^T of tile i    other columns of dQ^T of tile i - 1
    dP^T, dV and dK of tile i

The exponentials of a consumer overlap the matmuls of the other consumer, and partly overlap matmuls
of the same consumer.

A program processes only one work item. The data in shared memory are:

    content                           written by     read by              slots
    K, V of the work item             producer       consumers            1, filled once
    Q, lse, -delta                    producer       consumers            2
    dO                                producer       consumers            1: a consumer reads it
                                                                          only in a part of a step
    dS^T of a tile                    a consumer     the same consumer    1 for each consumer
    64 columns of dQ^T                a consumer     TMA                  1 for each consumer

At the end, the buffer of dQ^T holds first dV and then dK, and TMA copies them to global memory. The
consumers store dK and dV of packed sequences without TMA. If several work items have the same keys,
see `backward.sums`.
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
from systems.kernels.flash_attention.hopper.registers import in_elements, store_rows

KEYS = gl.constexpr(64)  # number of keys of a work item
HEAD_DIM = gl.constexpr(256)
HALF = gl.constexpr(128)  # number of columns of a half
CHUNK = gl.constexpr(64)  # number of columns of dQ that are computed at a time
Q_SLOTS = gl.constexpr(2)
# Registers per thread, as in `backward.d128`
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)


@aggregate
class Shared:
    """Tiles in shared memory, and the mbarriers of those that the producer fills.

    The first dimension is the slot, and of ds and dq the index of the consumer.
    """

    k: gl.shared_memory_descriptor  # (1, 64, 256)
    v: gl.shared_memory_descriptor  # (1, 64, 256 or 128)
    q: gl.shared_memory_descriptor  # (slots, 64, 256)
    do: gl.shared_memory_descriptor  # as v
    lse: gl.shared_memory_descriptor  # float32 (slots, 64), in base 2
    minus_delta: gl.shared_memory_descriptor  # float32 (slots, 64)
    ds: gl.shared_memory_descriptor  # (2, 64 keys, 64 queries)
    dq: gl.shared_memory_descriptor  # float32 (2, 64, 64), see `backward.rings.add_dq`
    kv_full: gl.shared_memory_descriptor  # (1)
    q_full: gl.shared_memory_descriptor  # (slots), one for q, lse and minus_delta together
    q_empty: gl.shared_memory_descriptor  # (slots)
    do_full: gl.shared_memory_descriptor  # (1)
    do_empty: gl.shared_memory_descriptor  # (1)

    @gluon.constexpr_function
    def __init__(
        self, k, v, q, do, lse, minus_delta, ds, dq, kv_full, q_full, q_empty, do_full, do_empty
    ):
        self.k = k
        self.v = v
        self.q = q
        self.do = do
        self.lse = lse
        self.minus_delta = minus_delta
        self.ds = ds
        self.dq = dq
        self.kv_full = kv_full
        self.q_full = q_full
        self.q_empty = q_empty
        self.do_full = do_full
        self.do_empty = do_empty


@gluon.jit
def _allocate(k_desc, v_desc, lse_desc, dq_desc):
    """Allocate the tiles in shared memory and their mbarriers, and return `Shared`."""
    dtype: gl.constexpr = k_desc.dtype
    VALUE_DIM: gl.constexpr = v_desc.block_type.shape[3]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, HEAD_DIM], dtype)
    v_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, VALUE_DIM], dtype)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, BLOCK_Q], dtype)
    return Shared(
        gl.allocate_shared_memory(dtype, [1, KEYS, HEAD_DIM], layout),
        gl.allocate_shared_memory(dtype, [1, KEYS, VALUE_DIM], v_layout),
        gl.allocate_shared_memory(dtype, [Q_SLOTS, BLOCK_Q, HEAD_DIM], layout),
        gl.allocate_shared_memory(dtype, [1, BLOCK_Q, VALUE_DIM], v_layout),
        gl.allocate_shared_memory(gl.float32, [Q_SLOTS, BLOCK_Q], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [Q_SLOTS, BLOCK_Q], lse_desc.layout),
        gl.allocate_shared_memory(dtype, [2, KEYS, BLOCK_Q], ds_layout),
        gl.allocate_shared_memory(gl.float32, [2, CHUNK, BLOCK_Q], dq_desc.layout),
        barriers(1, 1),
        barriers(Q_SLOTS, 1),
        barriers(Q_SLOTS, 2),
        barriers(1, 1),
        barriers(1, 2),
    )


@gluon.jit
def _produce(shared, problem, q_desc, do_desc, k_desc, v_desc, lse_desc, minus_delta_desc):
    """Load the tensors of the work item into shared memory. The producer warp runs this."""
    if problem.PACKED:  # noqa: SIM102 (a constant)
        # The grid has room for more blocks than there may be.
        if gl.program_id(0) >= problem.n_items:
            return
    row_bytes: gl.constexpr = HEAD_DIM * k_desc.dtype.primitive_bitwidth // 8
    value_bytes: gl.constexpr = v_desc.block_type.nbytes // KEYS
    item = problem.locate(gl.program_id(0))
    batch = item.head // problem.n_heads
    head = item.head % problem.n_heads
    key = item.key_start + item.first_key
    kv_full = shared.kv_full.index(0)
    mbarrier.expect(kv_full, KEYS * (row_bytes + value_bytes))
    kv_head = head // problem.ITEMS_PER_KV
    copy(k_desc, [batch, kv_head, key, 0], kv_full, shared.k.index(0))
    copy(v_desc, [batch, kv_head, key, 0], kv_full, shared.v.index(0))
    do_full = shared.do_full.index(0)
    for which in range(problem.Q_PER_ITEM):
        q_head = head * problem.Q_PER_ITEM + which
        before = (item.head * problem.Q_PER_ITEM + which) * problem.n_padded
        for i in range(item.n_tiles):
            step = which * item.n_tiles + i
            slot = step % Q_SLOTS
            row = item.tile(i) * BLOCK_Q
            padded_row = before + item.padded_query_start + row
            row += item.query_start
            q_full = shared.q_full.index(slot)
            mbarrier.wait(shared.q_empty.index(slot), (step // Q_SLOTS) & 1 ^ 1)
            mbarrier.expect(q_full, BLOCK_Q * (row_bytes + 8))  # + 8 bytes: lse and minus_delta
            copy(q_desc, [batch, q_head, row, 0], q_full, shared.q.index(slot))
            copy(lse_desc, [padded_row], q_full, shared.lse.index(slot))
            copy(minus_delta_desc, [padded_row], q_full, shared.minus_delta.index(slot))
            mbarrier.wait(shared.do_empty.index(0), step & 1 ^ 1)
            mbarrier.expect(do_full, BLOCK_Q * value_bytes)
            copy(do_desc, [batch, q_head, row, 0], do_full, shared.do.index(0))


@gluon.jit
def _begin_dq(shared, zero, layout: gl.constexpr, WHICH: gl.constexpr, PART: gl.constexpr):
    """Issue the WGMMA that computes 64 columns of dQ from the dS^T in shared memory, as dQ^T.

    The function returns dQ^T, float32 (64, 64). The caller must wait for the WGMMA before it uses
    dQ^T, or overwrites dS^T. PART is 0 for the first and 1 for the last 64 columns of this
    consumer's half. `zero` is the number 0, not as a constant, see `backward.d128`.
    """
    zeros = gl.zeros([CHUNK, BLOCK_Q], gl.float32, layout)
    first: gl.constexpr = WHICH * HALF + PART * CHUNK
    kt = shared.k.index(zero).permute((1, 0)).slice(first, CHUNK, 0)
    return warpgroup_mma(kt, shared.ds.index(WHICH), zeros, use_acc=False, is_async=True)


@gluon.jit
def _add(shared, dq_desc, dq, row, WHICH: gl.constexpr):
    """Add 64 columns of dQ^T to global memory by TMA, asynchronously, at `row` of dq_desc."""
    buffer = shared.dq.index(WHICH)
    tma.store_wait(pendings=0)  # until TMA has read the previous columns from this buffer
    add_dq(dq_desc, dq, row, buffer)


@gluon.jit
def _step(
    shared, dq_desc, problem, item, i, dk, dv, first_query, row,
    WHICH: gl.constexpr, HIGH: gl.constexpr, VALUE_HIGH: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Add the contribution of tile i to dk and dv, and add dQ of tile i - 1 to global memory.

    dk and dv are this consumer's half of the columns of the gradients of the 64 keys, float32,
    summed over the earlier tiles. dk is not yet multiplied by the scale. `row` is the row of
    dq_desc at which the half of dQ^T of tile i - 1 starts. HIGH is the number of columns of the
    second half that the matmuls use, 64 or 128. VALUE_HIGH is the same for V, dO and dV, 0, 64 or
    128; with 0, consumer 1 does not change dv. For the others, see `_step` in `backward.d128`.
    Returns the new dk and dv.
    """
    dtype: gl.constexpr = shared.q.dtype
    COLUMNS: gl.constexpr = dk.shape[1]
    HAS_DV: gl.constexpr = WHICH == 0 or VALUE_HIGH > 0
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    slot = i % Q_SLOTS
    # Always 0, but not a constant for the compiler, as in `backward.d128`
    zero = first_query >> 30

    dq = _begin_dq(shared, zero, layout, WHICH, 0)
    mbarrier.wait(shared.q_full.index(slot), (i // Q_SLOTS) & 1)
    s = times(shared.k.index(zero), shared.q.index(slot), layout, HALF + HIGH)
    dq = warpgroup_mma_wait(2 if HIGH == 64 else 1, deps=[dq])  # S^T stays in flight
    if i > 0:
        _add(shared, dq_desc, dq, row, WHICH)
    if not problem.SOFTCAP:
        lse = row_of(shared.lse.index(slot), layout)
    if COLUMNS > CHUNK:
        dq = _begin_dq(shared, zero, layout, WHICH, 1)
        s = warpgroup_mma_wait(1, deps=[s])  # the WGMMA of dQ^T stays in flight
    else:
        s = warpgroup_mma_wait(0, deps=[s])
    if problem.SOFTCAP:  # loaded above, lse would be spilled
        lse = row_of(shared.lse.index(slot), layout)
    p, weighted = probabilities(s, lse, problem, item, item.first_key, first_query, MASKED)
    p16 = gl.convert_layout(p.to(dtype), operand)
    if COLUMNS > CHUNK:
        dq = warpgroup_mma_wait(0, deps=[dq])
        if i > 0:
            _add(shared, dq_desc, dq, row + CHUNK, WHICH)
    # Compute dP^T - delta: the accumulator of dP^T starts at -delta, as in `backward.d128`.
    minus_delta = row_of(shared.minus_delta.index(slot), layout)
    dp, _ = gl.broadcast(minus_delta[None, :], p)
    mbarrier.wait(shared.do_full.index(0), i & 1)
    do = shared.do.index(zero)
    dp = add_times(shared.v.index(zero), do, dp, HALF + VALUE_HIGH)
    if HAS_DV:
        dv = warpgroup_mma(p16, do.slice(WHICH * HALF, COLUMNS, 1), dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp])  # dV stays in flight
    else:
        dp = warpgroup_mma_wait(0, deps=[dp])
    ds = (weighted * dp).to(dtype)
    ds16 = gl.convert_layout(ds, operand)
    q = shared.q.index(slot).slice(WHICH * HALF, COLUMNS, 1)
    dk = warpgroup_mma(ds16, q, dk, is_async=True)
    # Store dS^T for dQ^T of this tile, while dV and dK are in flight. No WGMMA reads the previous
    # dS^T any more.
    shared.ds.index(WHICH).store(ds)
    # Make the stores of all warps visible to the WGMMAs that read them.
    fence_async_shared()
    barrier()
    if HAS_DV:
        dv, p16 = warpgroup_mma_wait(1, deps=[dv, p16])
        # Each warp has waited separately. The compiler adds no barrier before the arrival, because
        # there is one above.
        barrier()
    mbarrier.arrive(shared.do_empty.index(0), count=1)
    dk, ds16 = warpgroup_mma_wait(0, deps=[dk, ds16])
    mbarrier.arrive(shared.q_empty.index(slot), count=1)
    return dk, dv


@gluon.jit
def _send(desc, coord, value, buffer):
    """Store a tile to global memory by TMA, and wait until TMA has read the buffer.

    The tiles of `desc` are (1, 1, 64, 128), and `value` has the first 64 or 128 columns. The tensor
    must not have the others. `buffer` is float32 (64, 64), in shared memory.
    """
    tile = reinterpret(buffer, desc.dtype, desc.block_type.shape, desc.layout)
    columns = tile.reshape([KEYS, HALF]).slice(0, value.shape[1], 1)
    columns.store(value.to(desc.dtype))
    fence_async_shared()
    async_store(desc, coord, tile)
    tma.store_wait(pendings=0)


@gluon.jit
def _consume(
    shared, problem, dq_desc, dk_desc, dv_desc, sums, dkey, dvalue, dk_batch, dk_head, dk_row,
    dv_batch, dv_head, dv_row, scale, WHICH: gl.constexpr, HIGH: gl.constexpr,
    VALUE_HIGH: gl.constexpr, SUMMED: gl.constexpr,
):  # fmt: skip
    """Compute this consumer's half of the columns of dQ, dK and dV. A consumer runs this."""
    COLUMNS: gl.constexpr = HIGH if WHICH == 1 else HALF
    HAS_DV: gl.constexpr = WHICH == 0 or VALUE_HIGH > 0
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    if problem.PACKED:  # noqa: SIM102 (a constant)
        if gl.program_id(0) >= problem.n_items:
            return
    item = problem.locate(gl.program_id(0))
    dk = gl.zeros([KEYS, COLUMNS], gl.float32, layout)
    dv = gl.zeros([KEYS, COLUMNS], gl.float32, layout)
    tiles_per_head = problem.n_padded // BLOCK_Q
    # Row of this consumer's half of dQ^T for tile 0 of the first head of q
    row = item.head * problem.Q_PER_ITEM * tiles_per_head + item.padded_query_start // BLOCK_Q
    row = row * HEAD_DIM + WHICH * HALF
    mbarrier.wait(shared.kv_full.index(0), 0)
    for which in range(problem.Q_PER_ITEM):
        before = which * item.n_tiles  # number of steps for earlier heads of q
        head_row = row + which * tiles_per_head * HEAD_DIM
        for i in range(item.n_first()):
            dk, dv = _step(
                shared, dq_desc, problem, item, before + i, dk, dv, item.tile(i) * BLOCK_Q,
                row_before(problem, item, head_row, i, HEAD_DIM), WHICH, HIGH, VALUE_HIGH, True,
            )  # fmt: skip
        for i in range(item.n_first(), item.n_tiles):
            dk, dv = _step(
                shared, dq_desc, problem, item, before + i, dk, dv, item.tile(i) * BLOCK_Q,
                row_before(problem, item, head_row, i, HEAD_DIM), WHICH, HIGH, VALUE_HIGH, False,
            )  # fmt: skip
    last_tile = item.tile(item.n_tiles - 1)
    row += ((problem.Q_PER_ITEM - 1) * tiles_per_head + last_tile) * HEAD_DIM
    for part in gl.static_range(COLUMNS // CHUNK):
        dq = _begin_dq(shared, 0, s_layout, WHICH, part)
        dq = warpgroup_mma_wait(0, deps=[dq])
        _add(shared, dq_desc, dq, row + part * CHUNK, WHICH)
    batch = item.head // problem.n_heads
    head = item.head % problem.n_heads // problem.ITEMS_PER_KV
    key_row = item.key_start + item.first_key
    column: gl.constexpr = WHICH * HALF
    writes = gl.to_tensor(True)
    if SUMMED:
        dk_columns: gl.constexpr = HALF + HIGH
        dv_columns: gl.constexpr = HALF + VALUE_HIGH
        dv_sums = sums_of_values(problem, sums, dk_columns)
        sum_of_items(problem, item, key_row, sums, dk_columns, column, dk, 0, True)
        if HAS_DV:
            sum_of_items(problem, item, key_row, dv_sums, dv_columns, column, dv, 0, True)
        writes = is_last_item(problem, item, key_row, problem.turns, WHICH)
        if writes:
            dk = sum_of_items(problem, item, key_row, sums, dk_columns, column, dk, 0, False)
            if HAS_DV:
                dv = sum_of_items(problem, item, key_row, dv_sums, dv_columns, column, dv, 0, False)
    if writes:
        if problem.PACKED:
            # TMA would also write to the first rows of the next packed sequence.
            n_rows = item.key_start + item.n_keys
            dk_base = dkey + batch * in_elements(dk_batch) + head * in_elements(dk_head) + column
            dv_base = dvalue + batch * in_elements(dv_batch) + head * in_elements(dv_head) + column
            store_rows(dk_base, dk * scale, key_row, n_rows, in_elements(dk_row))
            if HAS_DV:
                store_rows(dv_base, dv, key_row, n_rows, in_elements(dv_row))
        else:
            buffer = shared.dq.index(WHICH)
            tma.store_wait(pendings=0)
            if HAS_DV:
                _send(dv_desc, [batch, head, key_row, column], dv, buffer)
            _send(dk_desc, [batch, head, key_row, column], dk * scale, buffer)
    tma.store_wait(pendings=0)


@gluon.jit(
    do_not_specialize=[
        "n_programs", "n_heads", "n_queries", "n_keys", "n_padded", "n_splits", "queries_per_split",
        "group", "n_items", "left", "right", "dk_batch", "dk_head", "dk_row", "dv_batch", "dv_head",
        "dv_row",
    ]
)  # fmt: skip
def d256_backward_kernel(
    q_desc, do_desc, k_desc, v_desc, lse_desc, minus_delta_desc, dq_desc, dk_desc, dv_desc,
    counter, turns, sums, dkey, dvalue, starts_q, starts_k, blocks,
    dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    n_programs, n_heads, n_queries, n_keys, n_padded, n_splits, queries_per_split, group, n_items,
    left, right, scale, scale_log2e, cap_log2e,
    IS_CAUSAL: gl.constexpr, BOUNDED: gl.constexpr, LOWER_RIGHT: gl.constexpr,
    PACKED: gl.constexpr, SOFTCAP: gl.constexpr, SUMMED: gl.constexpr, Q_PER_KV: gl.constexpr,
    Q_PER_ITEM: gl.constexpr, DETERMINISTIC: gl.constexpr, HIGH: gl.constexpr,
    VALUE_HIGH: gl.constexpr,
):  # fmt: skip
    """Compute dQ, dK and dV with one warp-specialized program per work item.

    The arguments that are not listed below are those of `backward.d128.d128_backward_kernel`. Their
    head_dim is 256 here instead of 128, and blocks have 64 keys. The tensors of the TMA descriptors
    may have fewer columns, 136 or more. With PACKED, they must have 256, or 192 if HIGH is 64.
    Those of V, dO and dV have 128 if VALUE_HIGH is 0.

    Args:
        q_desc, do_desc, k_desc, v_desc, dk_desc, dv_desc: TMA descriptors, with tiles of 64 rows.
            The tiles of q and k have 256 columns, those of dO and V have 256, or 128 if VALUE_HIGH
            is 0, and those of dK and dV have 128.
        dq_desc: TMA descriptor of float32 (batch * q_heads * n_padded * 4, 64), with tiles of (64,
            64), as in `d128_backward_kernel`. The transposed tiles of dQ / scale are (256, 64).
        turns: used only with SUMMED.
        DETERMINISTIC: must be False. Additions to dQ have no fixed order.
        HIGH: columns past the first 128 that the matmuls use: 64 if the tensors have at most 192
            columns, otherwise 128.
        VALUE_HIGH: the same for V, dO and dV: HIGH, or 0 if their tensors have at most 128 columns.
    """
    gl.static_assert(not DETERMINISTIC)
    if not SUMMED:
        n_splits = gl.to_tensor(1)  # a constant, so that the compiler removes divisions by it
    if PACKED:
        n_items = gl.load(blocks) * n_heads
    problem = BackwardProblem(
        n_programs, n_heads, n_queries, n_keys, n_padded, n_splits, queries_per_split, group,
        n_items, left, right, starts_q, starts_k, blocks, scale_log2e, cap_log2e, turns, IS_CAUSAL,
        BOUNDED, LOWER_RIGHT, PACKED, SOFTCAP, Q_PER_KV, Q_PER_ITEM, DETERMINISTIC, KEYS,
    )  # fmt: skip
    shared = _allocate(k_desc, v_desc, lse_desc, dq_desc)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (shared, problem, dq_desc, dk_desc, dv_desc, sums, dkey, dvalue,
                        dk_batch, dk_head, dk_row,
                        dv_batch, dv_head, dv_row, scale, gl.constexpr(0), HIGH,
                        VALUE_HIGH, SUMMED)),
            (_consume, (shared, problem, dq_desc, dk_desc, dv_desc, sums, dkey, dvalue,
                        dk_batch, dk_head, dk_row,
                        dv_batch, dv_head, dv_row, scale, gl.constexpr(1), HIGH,
                        VALUE_HIGH, SUMMED)),
            (_produce, (shared, problem,
                        q_desc, do_desc, k_desc, v_desc, lse_desc, minus_delta_desc)),
        ],
        [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
