"""Warp-specialized backward pass of FlashAttention for Hopper and head_dim 72 to 128, in Gluon.

The module `backward.d64` describes the formulas and the backward pass for head_dim 64. The
module `backward.work` describes work items and steps, and `backward.rings` the rings of slots in
shared memory.

The tiles have 128 columns. If the tensors have fewer, TMA pads their tiles in shared memory with
columns of zeros. If the tensors have at most 96, the matmuls skip the last 32 columns, except that
of dQ^T.

Two consumer warpgroups compute dK and dV of 64 keys each. With head_dim 128, dK and dV of 64 keys
take 128 registers per thread. Too few registers are left for a third warpgroup that computes dQ, as
in `backward.d64`. Instead, the two consumers have 240 registers per thread and also compute
dQ^T. Each consumer computes dQ^T for 64 of the 128 columns of dQ, and needs the dS^T of both
consumers for it. In each step, a consumer issues its matmuls in this order:

    S^T of tile i    dQ^T of tile i - 1    dP^T, dV and dK of tile i

dQ^T of a tile is computed one step after dS^T of this tile. By then, the other consumer has usually
stored its dS^T, so a consumer rarely waits for the other one. The exponentials of a consumer
overlap the matmuls of the other consumer, and partly overlap matmuls of the same consumer.

A program processes only one work item, because shared memory has no room for K and V of a second
work item. As a result, no computation of the program overlaps the stores of dK and dV at its end.
To make these stores fast, the consumers write dK and dV to the shared memory of K and V, and TMA
copies them to global memory. They store dK and dV of packed sequences without it. If several work
items have the same keys, see `backward.sums`.

The rings in shared memory are:

    ring   content of a slot          written by     read by              slots
    kv     K, V of the work item      producer       consumers            1, filled once
    q      Q, dO, lse, -delta         producer       consumers            2
    ds     dS^T of a tile             consumers      consumers            2
    dq     one half of dQ^T           a consumer     TMA                  1 for each half
"""

# Kernel arguments have Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
# A tuple of one tensor or of two, by a constant
# mypy: disable-error-code=assignment

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

from systems.kernels.flash_attention.hopper.backward.rings import (
    add_dq,
    allocate,
    load_item,
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
from systems.kernels.flash_attention.hopper.backward.turns import add_in_order, pass_dq
from systems.kernels.flash_attention.hopper.backward.work import (
    BLOCK_Q,
    HALF_K,
    BackwardProblem,
    row_before,
)
from systems.kernels.flash_attention.hopper.column_parts import (
    add_product,
    operands,
    parts_of,
    scale_all,
    store_to_shared,
    wait_for_both,
    zeros,
)
from systems.kernels.flash_attention.hopper.gluon_names import async_store, reinterpret
from systems.kernels.flash_attention.hopper.registers import in_elements, store_rows

HEAD_DIM = gl.constexpr(128)
CHUNK = gl.constexpr(64)  # number of columns of dQ that a consumer computes: half of head_dim
KV_SLOTS = gl.constexpr(1)
Q_SLOTS = gl.constexpr(2)
DS_SLOTS = gl.constexpr(2)
# Registers per thread (setmaxnreg). The registers per thread of the three warpgroups add up to 504,
# see `tiles.HopperTile`: 240 + 24 leave 240 for consumer 0.
CONSUMER_REGISTERS = gl.constexpr(240)
PRODUCER_REGISTERS = gl.constexpr(24)


@gluon.jit
def _produce(shared, problem, q_desc, do_desc, k_desc, v_desc, lse_desc, minus_delta_desc):
    if problem.PACKED:  # noqa: SIM102 (a constant)
        # The grid has room for more blocks than there may be.
        if gl.program_id(0) >= problem.n_items:
            return
    load_item(
        shared, problem, q_desc, do_desc, k_desc, v_desc, lse_desc, minus_delta_desc,
        gl.program_id(0), 0, 0, KV_SLOTS, Q_SLOTS,
    )  # fmt: skip


@gluon.jit
def _add(shared, problem, dq_desc):
    if problem.PACKED:  # noqa: SIM102 (a constant)
        if gl.program_id(0) >= problem.n_items:
            return
    item = problem.locate(gl.program_id(0))
    add_in_order(shared, problem, item, dq_desc, gl.to_tensor(0), 1, 2)


@gluon.jit
def _begin_dq(shared, i, zero, layout: gl.constexpr, HALF: gl.constexpr):
    """Issue the WGMMAs of half of the columns of dQ for tile i - 1, as dQ^T, float32 (64, 64).

    The caller must wait for the WGMMAs before it uses dQ^T. For i = 0 there is no earlier tile, and
    the caller must not use the result. Consumer 0 (HALF) computes columns 0 to 63 of dQ, and
    consumer 1 the others. `zero` is the number 0; in a loop, it must be a variable that the
    compiler does not know to be constant.
    """
    slot = (i + DS_SLOTS - 1) % DS_SLOTS
    zeros = gl.zeros([CHUNK, BLOCK_Q], gl.float32, layout)
    other_full = shared.ds_full.index(2 * slot + 1 - HALF)
    mbarrier.wait(other_full, ((i + DS_SLOTS - 1) // DS_SLOTS + 1) & 1, pred=i > 0)
    # This consumer's half of head_dim of K^T, for the keys of consumer 0 and of consumer 1
    kt0 = shared.k.index(zero).permute((1, 0)).slice(HALF * CHUNK, CHUNK, 0)
    kt1 = shared.k.index(zero + 1).permute((1, 0)).slice(HALF * CHUNK, CHUNK, 0)
    dq = warpgroup_mma(kt0, shared.ds.index(2 * slot), zeros, use_acc=False, is_async=True)
    return warpgroup_mma(kt1, shared.ds.index(2 * slot + 1), dq, is_async=True)


@gluon.jit
def _add_dq(
    shared, dq_desc, problem, dq, i, row, HALF: gl.constexpr, LATER: gl.constexpr = 0
):  # fmt: skip
    """Add one consumer's half of dQ^T of a tile to global memory by TMA, asynchronously.

    The half is first stored in shared memory. The function waits until TMA has read the previous
    half from there. If additions have a fixed order, the adder warp adds it from there. `dq` is
    float32 (64, 64), and `row` is the row of dq_desc at which the half starts. `i` counts earlier
    calls by this consumer. The function does not wait for the LATER stores by TMA that this
    consumer has issued since its previous call.
    """
    if problem.DETERMINISTIC:
        pass_dq(shared, dq, i, HALF, 1)
    else:
        dq_tile = shared.dq.index(HALF)
        tma.store_wait(pendings=LATER)  # until TMA has read the previous dQ from this buffer
        add_dq(dq_desc, dq, row, dq_tile)


@gluon.jit
def _send(desc, coord, sums, buffer, IN_PARTS: gl.constexpr):
    """Store dK or dV of 64 keys to global memory by TMA, asynchronously.

    The tiles of `desc` are (1, 1, 64, 128), and `buffer` is (64, 128). The caller must not
    overwrite the buffer before TMA has read it. `sums` is dK or dV (see `column_parts`), and the
    tensor must not have further columns.
    """
    store_to_shared(buffer, sums, IN_PARTS)
    fence_async_shared()
    tile = reinterpret(buffer, desc.dtype, desc.block_type.shape, desc.layout)
    async_store(desc, coord, tile)


@gluon.jit
def _sum_of_items(
    problem, item, key_row, sums, COLUMNS: gl.constexpr, value, IN_PARTS: gl.constexpr,
    ADDS: gl.constexpr,
):  # fmt: skip
    """Add dK or dV (see `column_parts`) to the sums, or read it, see `sums.sum_of_items`."""
    first = sum_of_items(problem, item, key_row, sums, COLUMNS, 0, value[0], 0, ADDS)
    if IN_PARTS:
        LOW: gl.constexpr = value[0].shape[1]
        rest = sum_of_items(problem, item, key_row, sums, COLUMNS, LOW, value[1], 0, ADDS)
        both = (first, rest)
    else:
        both = (first,)
    return both


@gluon.jit
def _step(
    shared, dq_desc, problem, item, i, dk, dv, first_key, first_query, row,
    HALF: gl.constexpr, COLUMNS: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Add the contribution of tile i to dk and dv, and add dQ of tile i - 1 to global memory.

    Both consumers call this function for each tile, of 64 queries.

    dk and dv are the gradients of this consumer's 64 keys, (64, COLUMNS), summed over the earlier
    tiles (see `column_parts`). dk is not yet multiplied by the scale. `i` counts the earlier tiles
    of the work item, over all heads of q. `first_key` belongs to this consumer, and `row` is the
    row of dq_desc at which its half of dQ^T of tile i - 1 starts. COLUMNS is 96 or 128; the matmuls
    of dQ^T use all 128. A tile is MASKED if some of its queries do not see all keys, or if keys are
    past the end. Returns the new dk and dv.
    """
    dtype: gl.constexpr = shared.q.dtype
    IN_PARTS: gl.constexpr = COLUMNS < HEAD_DIM
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    q_slot = i % Q_SLOTS
    ds_slot = i % DS_SLOTS
    q = shared.q.index(q_slot)
    do = shared.do.index(q_slot)
    # Always 0, but not a constant for the compiler. With a constant, the compiler would compute the
    # WGMMA descriptors of all slices of K and V before the loop. They do not fit in the registers,
    # so they would be spilled to local memory and reloaded one by one before the matmuls. This
    # would take 10 to 14% of the time of the backward pass.
    zero = first_query >> 30
    k = shared.k.index(HALF + zero)
    v = shared.v.index(HALF + zero)

    mbarrier.wait(shared.q_full.index(q_slot), (i // Q_SLOTS) & 1)
    s = times(k, q, layout, COLUMNS)
    dq = _begin_dq(shared, i, zero, layout, HALF)
    lse = row_of(shared.lse.index(q_slot), layout)
    s = warpgroup_mma_wait(2, deps=[s])  # the two WGMMAs of dQ^T stay in flight
    p, weighted = probabilities(s, lse, problem, item, first_key, first_query, MASKED)
    p16 = operands(p.to(dtype), HEAD_DIM, IN_PARTS)
    dq = warpgroup_mma_wait(0, deps=[dq])
    mbarrier.arrive(shared.ds_empty.index((i + DS_SLOTS - 1) % DS_SLOTS), count=1, pred=i > 0)
    if i > 0:
        _add_dq(shared, dq_desc, problem, dq, i - 1, row, HALF)
    # Compute dP^T - delta: the accumulator of dP^T starts at -delta. Keeping delta separately would
    # need more registers, but dK, dV, dP, and P in float32 and in 16 bits take all of them.
    minus_delta = row_of(shared.minus_delta.index(q_slot), layout)
    dp, _ = gl.broadcast(minus_delta[None, :], p)
    dp = add_times(v, do, dp, COLUMNS)
    dv = add_product(p16, parts_of(do, IN_PARTS), dv, IN_PARTS)
    dp = warpgroup_mma_wait(2 if IN_PARTS else 1, deps=[dp])  # dV stays in flight
    ds = (weighted * dp).to(dtype)
    ds16 = operands(ds, HEAD_DIM, IN_PARTS)
    dk = add_product(ds16, parts_of(q, IN_PARTS), dk, IN_PARTS)
    # Pass dS^T to both consumers while dV and dK are in flight. fence_async_shared makes the stores
    # visible to the WGMMAs that read them.
    mbarrier.wait(shared.ds_empty.index(ds_slot), (i // DS_SLOTS) & 1 ^ 1)
    shared.ds.index(2 * ds_slot + HALF).store(ds)
    fence_async_shared()
    mbarrier.arrive(shared.ds_full.index(2 * ds_slot + HALF), count=1)
    dv, dk = wait_for_both(dv, p16, dk, ds16, IN_PARTS)
    mbarrier.arrive(shared.q_empty.index(q_slot), count=1)
    return dk, dv


@gluon.jit
def _consume(
    shared, problem, dq_desc, dk_desc, dv_desc, sums, dkey, dvalue, dk_batch, dk_head, dk_row,
    dv_batch, dv_head, dv_row, scale, HALF: gl.constexpr, COLUMNS: gl.constexpr,
    SUMMED: gl.constexpr,
):  # fmt: skip
    IN_PARTS: gl.constexpr = COLUMNS < HEAD_DIM
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    if problem.PACKED:  # noqa: SIM102 (a constant)
        if gl.program_id(0) >= problem.n_items:
            return
    item = problem.locate(gl.program_id(0))
    first_key = item.first_key + HALF * HALF_K
    dk = zeros(HEAD_DIM, IN_PARTS)
    dv = zeros(HEAD_DIM, IN_PARTS)
    tiles_per_head = problem.n_padded // BLOCK_Q
    # Row of this consumer's half of dQ^T for tile 0 of the first head of q
    row = item.head * problem.Q_PER_ITEM * tiles_per_head + item.padded_query_start // BLOCK_Q
    row = row * HEAD_DIM + HALF * CHUNK
    mbarrier.wait(shared.kv_full.index(0), 0)
    mbarrier.wait(shared.kv_full.index(1), 0)
    for which in range(problem.Q_PER_ITEM):
        before = which * item.n_tiles  # number of steps for earlier heads of q
        head_row = row + which * tiles_per_head * HEAD_DIM
        for i in range(item.n_first()):
            tile_row = row_before(problem, item, head_row, i, HEAD_DIM)
            dk, dv = _step(
                shared, dq_desc, problem, item, before + i, dk, dv, first_key,
                item.tile(i) * BLOCK_Q, tile_row, HALF, COLUMNS, True,
            )  # fmt: skip
        for i in range(item.n_first(), item.n_tiles):
            tile_row = row_before(problem, item, head_row, i, HEAD_DIM)
            dk, dv = _step(
                shared, dq_desc, problem, item, before + i, dk, dv, first_key,
                item.tile(i) * BLOCK_Q, tile_row, HALF, COLUMNS, False,
            )  # fmt: skip
    n = problem.Q_PER_ITEM * item.n_tiles
    last_ds = (n + DS_SLOTS - 1) % DS_SLOTS
    last_tile = item.tile(item.n_tiles - 1)
    row += ((problem.Q_PER_ITEM - 1) * tiles_per_head + last_tile) * HEAD_DIM
    dq = _begin_dq(shared, n, 0, s_layout, HALF)
    batch = item.head // problem.n_heads
    head = item.head % problem.n_heads // problem.ITEMS_PER_KV
    key_row = item.key_start + first_key
    if not problem.PACKED and not SUMMED:
        # This consumer no longer reads its half of V: use it as the buffer of dV.
        _send(dv_desc, [batch, head, key_row, 0], dv, shared.v.index(HALF), IN_PARTS)
    dq = warpgroup_mma_wait(0, deps=[dq])
    mbarrier.arrive(shared.ds_empty.index(last_ds), count=1)
    later: gl.constexpr = 0 if SUMMED or problem.PACKED else 1
    _add_dq(shared, dq_desc, problem, dq, n - 1, row, HALF, later)
    # Both consumers read all of K for dQ. When both have released the last dS^T, nothing reads K
    # any more, and its buffer can hold dK.
    mbarrier.wait(shared.ds_empty.index(last_ds), ((n - 1) // DS_SLOTS) & 1)
    writes = gl.to_tensor(True)
    if SUMMED:
        dv_sums = sums_of_values(problem, sums, COLUMNS)
        _sum_of_items(problem, item, key_row, sums, COLUMNS, dk, IN_PARTS, True)
        _sum_of_items(problem, item, key_row, dv_sums, COLUMNS, dv, IN_PARTS, True)
        writes = is_last_item(problem, item, key_row, problem.turns, 0)
        if writes:
            dk = _sum_of_items(problem, item, key_row, sums, COLUMNS, dk, IN_PARTS, False)
            dv = _sum_of_items(problem, item, key_row, dv_sums, COLUMNS, dv, IN_PARTS, False)
            if not problem.PACKED:
                _send(dv_desc, [batch, head, key_row, 0], dv, shared.v.index(HALF), IN_PARTS)
    if writes:
        dk = scale_all(dk, scale, IN_PARTS)
        if problem.PACKED:
            # TMA would also write to the first rows of the next packed sequence.
            n_rows = item.key_start + item.n_keys
            dk_base = dkey + batch * in_elements(dk_batch) + head * in_elements(dk_head)
            dv_base = dvalue + batch * in_elements(dv_batch) + head * in_elements(dv_head)
            store_rows(dk_base, dk[0], key_row, n_rows, in_elements(dk_row))
            store_rows(dv_base, dv[0], key_row, n_rows, in_elements(dv_row))
        else:
            _send(dk_desc, [batch, head, key_row, 0], dk, shared.k.index(HALF), IN_PARTS)
    tma.store_wait(pendings=0)


@gluon.jit(
    do_not_specialize=[
        "n_programs", "n_heads", "n_queries", "n_keys", "n_padded", "n_splits", "queries_per_split",
        "group", "n_items", "left", "right", "dk_batch", "dk_head", "dk_row", "dv_batch", "dv_head",
        "dv_row",
    ]
)  # fmt: skip
def d128_backward_kernel(
    q_desc, do_desc, k_desc, v_desc, lse_desc, minus_delta_desc, dq_desc, dk_desc, dv_desc,
    counter, turns, sums, dkey, dvalue, starts_q, starts_k, blocks,
    dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    n_programs, n_heads, n_queries, n_keys, n_padded, n_splits, queries_per_split, group, n_items,
    left, right, scale, scale_log2e, cap_log2e,
    IS_CAUSAL: gl.constexpr, BOUNDED: gl.constexpr, LOWER_RIGHT: gl.constexpr,
    PACKED: gl.constexpr, SOFTCAP: gl.constexpr, SUMMED: gl.constexpr, Q_PER_KV: gl.constexpr,
    Q_PER_ITEM: gl.constexpr, DETERMINISTIC: gl.constexpr, COLUMNS: gl.constexpr,
):  # fmt: skip
    """Compute dQ, dK and dV with one warp-specialized program per work item.

    The arguments that are not listed below are described in `backward_kernel`. Their head_dim is
    128 here instead of 64. The tensors of the TMA descriptors of Q, dO, K, V, dK and dV may have
    fewer columns. The missing columns are read as zeros and are not written. PACKED must then be
    False.

    Grid: (n_items,), or with PACKED at least the number of work items. Launch with num_warps=4, the
    number of warps of consumer 0.

    Args:
        dq_desc: TMA descriptor of float32 (batch * q_heads * n_padded * 2, 64), with tiles of (64,
            64). It must be zeros. The kernel adds dQ / scale to it, as one transposed tile (128,
            64) for every 64 queries.
        dk_desc, dv_desc: TMA descriptors of dK and dV, (batch, heads, n_keys, 128), with tiles of
            64 rows. Outputs without PACKED, not used otherwise.
        counter: not used.
        dkey, dvalue: outputs with PACKED, written without TMA, and not used otherwise.
        COLUMNS: columns that the matmuls use: 96 if the tensors have at most 96, else 128. With
            PACKED, it must be 128.
    """
    if not SUMMED:
        n_splits = gl.to_tensor(1)  # a constant, so that the compiler removes divisions by it
    if PACKED:
        n_items = gl.load(blocks) * n_heads
    problem = BackwardProblem(
        n_programs, n_heads, n_queries, n_keys, n_padded, n_splits, queries_per_split, group,
        n_items, left, right, starts_q, starts_k, blocks, scale_log2e, cap_log2e, turns, IS_CAUSAL,
        BOUNDED, LOWER_RIGHT, PACKED, SOFTCAP, Q_PER_KV, Q_PER_ITEM, DETERMINISTIC, 2 * HALF_K,
    )  # fmt: skip
    shared = allocate(
        q_desc, k_desc, lse_desc, dq_desc, KV_SLOTS, Q_SLOTS, DS_SLOTS, 2, 2, 2, DETERMINISTIC
    )
    fence_async_shared()
    if DETERMINISTIC:
        gl.warp_specialize(
            [
                (_consume, (shared, problem, dq_desc, dk_desc, dv_desc, sums, dkey, dvalue,
                            dk_batch, dk_head, dk_row,
                            dv_batch, dv_head, dv_row, scale, gl.constexpr(0), COLUMNS,
                            SUMMED)),
                (_consume, (shared, problem, dq_desc, dk_desc, dv_desc, sums, dkey, dvalue,
                            dk_batch, dk_head, dk_row,
                            dv_batch, dv_head, dv_row, scale, gl.constexpr(1), COLUMNS,
                            SUMMED)),
                (_produce, (shared, problem,
                            q_desc, do_desc, k_desc, v_desc, lse_desc, minus_delta_desc)),
                (_add, (shared, problem, dq_desc)),
            ],
            [4, 1, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_consume, (shared, problem, dq_desc, dk_desc, dv_desc, sums, dkey, dvalue,
                            dk_batch, dk_head, dk_row,
                            dv_batch, dv_head, dv_row, scale, gl.constexpr(0), COLUMNS,
                            SUMMED)),
                (_consume, (shared, problem, dq_desc, dk_desc, dv_desc, sums, dkey, dvalue,
                            dk_batch, dk_head, dk_row,
                            dv_batch, dv_head, dv_row, scale, gl.constexpr(1), COLUMNS,
                            SUMMED)),
                (_produce, (shared, problem,
                            q_desc, do_desc, k_desc, v_desc, lse_desc, minus_delta_desc)),
            ],
            [4, 1], [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
