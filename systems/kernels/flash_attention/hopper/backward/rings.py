"""Rings of slots in shared memory through which the warps of a Hopper backward kernel pass data.

A ring is a fixed number of slots in shared memory that are used in turn. mbarriers protect the
slots: readers wait on `full` before they read a slot, and writers wait on `empty` before they
overwrite it. A slot with two halves has one `full` for each half. The ring of dQ has mbarriers only
if additions to dQ have a fixed order (see the module `backward.turns`). Otherwise, the warpgroup
that writes a slot also starts the addition, and waits until TMA has read the slot before it
overwrites the slot.

The uses of a ring are numbered from 0. In a ring with S slots, use number n takes slot n % S. It is
phase n // S of the mbarriers of this slot. Readers wait for this phase of `full`, with its parity.
Writers wait for the previous phase of `empty`, which has the opposite parity. Before the first use
of a slot, the wait of the writers returns at once.

The module `backward.work` describes work items and their halves.
"""

# Kernel arguments have Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

# No `from __future__ import annotations`: an aggregate needs the types of its fields, not strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.core import _aggregate as aggregate

from systems.kernels.flash_attention.hopper.backward.work import BLOCK_Q, HALF_K
from systems.kernels.flash_attention.hopper.gluon_names import (
    async_atomic_add,
    async_load,
    reinterpret,
)


@aggregate
class Shared:
    """Rings of slots in shared memory, and their mbarriers.

    The first dimension of each field is the slot. In k, v and ds, it counts halves: slot i has the
    indices 2 * i and 2 * i + 1, with 64 keys each.
    """

    k: gl.shared_memory_descriptor  # (2 * slots, 64, head_dim), two halves per slot
    v: gl.shared_memory_descriptor  # as k
    q: gl.shared_memory_descriptor  # (slots, 64, head_dim)
    do: gl.shared_memory_descriptor  # as q
    lse: gl.shared_memory_descriptor  # float32 (slots, 64), in base 2
    minus_delta: gl.shared_memory_descriptor  # float32 (slots, 64)
    ds: gl.shared_memory_descriptor  # (2 * slots, 64 keys, 64 queries), two halves per slot
    dq: gl.shared_memory_descriptor  # float32 (slots, 64, 64), one tile of dQ^T, see `add_dq`
    kv_full: gl.shared_memory_descriptor  # (2 * slots), one for each half of k and v
    kv_empty: gl.shared_memory_descriptor  # (slots)
    q_full: gl.shared_memory_descriptor  # (slots), one for q, do, lse and minus_delta together
    q_empty: gl.shared_memory_descriptor  # (slots)
    ds_full: gl.shared_memory_descriptor  # (2 * slots), one for each half
    ds_empty: gl.shared_memory_descriptor  # (slots)
    dq_full: gl.shared_memory_descriptor  # (slots), used only for additions in a fixed order
    dq_empty: gl.shared_memory_descriptor  # as dq_full

    @gluon.constexpr_function
    def __init__(
        self, k, v, q, do, lse, minus_delta, ds, dq,
        kv_full, kv_empty, q_full, q_empty, ds_full, ds_empty, dq_full, dq_empty,
    ):  # fmt: skip
        self.k = k
        self.v = v
        self.q = q
        self.do = do
        self.lse = lse
        self.minus_delta = minus_delta
        self.ds = ds
        self.dq = dq
        self.kv_full = kv_full
        self.kv_empty = kv_empty
        self.q_full = q_full
        self.q_empty = q_empty
        self.ds_full = ds_full
        self.ds_empty = ds_empty
        self.dq_full = dq_full
        self.dq_empty = dq_empty


@gluon.jit
def barriers(n: gl.constexpr, count: gl.constexpr):
    """Allocate n mbarriers in shared memory.

    A phase of each mbarrier completes after `count` arrivals.
    """
    made = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(made.index(i), count=count)
    return made


@gluon.jit
def allocate(
    q_desc, k_desc, lse_desc, dq_desc,
    KV_SLOTS: gl.constexpr, Q_SLOTS: gl.constexpr, DS_SLOTS: gl.constexpr, DQ_SLOTS: gl.constexpr,
    KV_READERS: gl.constexpr, DS_READERS: gl.constexpr, DETERMINISTIC: gl.constexpr,
):  # fmt: skip
    """Allocate `Shared`: the rings of slots in shared memory and their mbarriers.

    The TMA descriptors give the dtypes, tile sizes and layouts. The rings are of K and V, of Q, dO,
    lse and -delta, of dS^T, and of dQ^T. READERS are the warpgroups that read K or V, and dS^T.
    """
    HEAD_DIM: gl.constexpr = k_desc.block_type.shape[3]
    dtype: gl.constexpr = k_desc.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, HEAD_DIM], dtype)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF_K, BLOCK_Q], dtype)
    k_shape: gl.constexpr = [2 * KV_SLOTS, HALF_K, HEAD_DIM]
    q_shape: gl.constexpr = [Q_SLOTS, BLOCK_Q, HEAD_DIM]
    row_shape: gl.constexpr = [Q_SLOTS, BLOCK_Q]
    dq_shape: gl.constexpr = [DQ_SLOTS, dq_desc.block_type.shape[0], BLOCK_Q]
    q_full, q_empty = barriers(Q_SLOTS, 1), barriers(Q_SLOTS, 2)
    dq_full, dq_empty = q_full, q_empty  # not used
    if DETERMINISTIC:
        dq_full, dq_empty = barriers(DQ_SLOTS, 1), barriers(DQ_SLOTS, 1)
    return Shared(
        gl.allocate_shared_memory(dtype, k_shape, layout),
        gl.allocate_shared_memory(dtype, k_shape, layout),
        gl.allocate_shared_memory(dtype, q_shape, layout),
        gl.allocate_shared_memory(dtype, q_shape, layout),
        gl.allocate_shared_memory(gl.float32, row_shape, lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, row_shape, lse_desc.layout),
        gl.allocate_shared_memory(dtype, [2 * DS_SLOTS, HALF_K, BLOCK_Q], ds_layout),
        gl.allocate_shared_memory(gl.float32, dq_shape, dq_desc.layout),
        barriers(2 * KV_SLOTS, 1),
        barriers(KV_SLOTS, KV_READERS),
        q_full,
        q_empty,
        barriers(2 * DS_SLOTS, 1),
        barriers(DS_SLOTS, DS_READERS),
        dq_full,
        dq_empty,
    )


@gluon.jit
def copy(desc, coord, barrier, shared):
    """Load a tile from global into shared memory by TMA, asynchronously.

    TMA notifies the barrier when it has written the tile. `shared` may lack leading dimensions of
    size 1 that the tiles of desc have.
    """
    tile = reinterpret(shared, desc.dtype, desc.block_type.shape, desc.layout)
    async_load(desc, coord, barrier, tile)


@gluon.jit
def load_item(
    shared, problem, q_desc, do_desc, k_desc, v_desc, lse_desc, minus_delta_desc, index, turn, n,
    KV_SLOTS: gl.constexpr, Q_SLOTS: gl.constexpr,
):  # fmt: skip
    """Load the tensors of one work item into shared memory by TMA, asynchronously.

    The producer warp calls this function. For each load, it first waits until the slot in shared
    memory is empty. This program has already processed `turn` work items with n tiles of queries. n
    for the next work item is returned.
    """
    HEAD_DIM: gl.constexpr = k_desc.block_type.shape[3]
    row_bytes: gl.constexpr = 2 * HEAD_DIM * k_desc.dtype.primitive_bitwidth // 8
    item = problem.locate(index)
    batch = item.head // problem.n_heads
    head = item.head % problem.n_heads
    kv_head = head // problem.ITEMS_PER_KV
    kv_slot = turn % KV_SLOTS
    mbarrier.wait(shared.kv_empty.index(kv_slot), (turn // KV_SLOTS) & 1 ^ 1)
    for half in gl.static_range(2):
        place = 2 * kv_slot + half
        key = item.key_start + item.first_key + half * HALF_K
        kv_full = shared.kv_full.index(place)
        mbarrier.expect(kv_full, HALF_K * row_bytes)
        copy(k_desc, [batch, kv_head, key, 0], kv_full, shared.k.index(place))
        copy(v_desc, [batch, kv_head, key, 0], kv_full, shared.v.index(place))
    for which in range(problem.Q_PER_ITEM):
        q_head = head * problem.Q_PER_ITEM + which
        before = (item.head * problem.Q_PER_ITEM + which) * problem.n_padded
        for i in range(item.n_tiles):
            step = n + which * item.n_tiles + i
            slot = step % Q_SLOTS
            row = item.tile(i) * BLOCK_Q
            padded_row = before + item.padded_query_start + row
            row += item.query_start
            q_full = shared.q_full.index(slot)
            mbarrier.wait(shared.q_empty.index(slot), (step // Q_SLOTS) & 1 ^ 1)
            mbarrier.expect(q_full, BLOCK_Q * (row_bytes + 8))  # + 8 bytes: lse and minus_delta
            copy(q_desc, [batch, q_head, row, 0], q_full, shared.q.index(slot))
            copy(do_desc, [batch, q_head, row, 0], q_full, shared.do.index(slot))
            copy(lse_desc, [padded_row], q_full, shared.lse.index(slot))
            copy(minus_delta_desc, [padded_row], q_full, shared.minus_delta.index(slot))
    return n + problem.Q_PER_ITEM * item.n_tiles


@gluon.jit
def row_of(shared, layout: gl.constexpr):
    """Load lse or -delta of a tile of 64 queries from shared memory, one number per query.

    `prepare_kernel` has stored the 64 numbers in an order in which each four numbers of a thread
    are contiguous, and in which the threads that load together use different banks. `layout` is the
    register layout of a tile of S^T, with one column per query. Number i of the result belongs to
    column i.
    """
    loaded: gl.constexpr = gl.DistributedLinearLayout(
        [[1], [2], [16], [32]], [[4], [8], [0], [0], [0]], [[0], [0]], [], [BLOCK_Q]
    )
    row = shared.load(loaded).reshape([BLOCK_Q // 16, 4, 2, 2]).permute((0, 2, 1, 3))
    return gl.convert_layout(row.reshape([BLOCK_Q]), gl.SliceLayout(0, layout), assert_trivial=True)


@gluon.jit
def store_dq(dq, shared):
    """Store a tile of dQ^T in shared memory, from where it is added to global memory.

    The tile is stored as (8, 64, 8), with 8 queries contiguous. The threads that store together
    then use different banks of shared memory, as they do not in the swizzled layouts of TMA. The
    sum in global memory has the same order, which `convert_kernel` undoes. dq is float32 (64 of
    head_dim, 64 queries), in registers.
    """
    order: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    tile = reinterpret(shared, gl.float32, [BLOCK_Q // 8, dq.shape[0], 8], order)
    tile.store(dq.reshape([dq.shape[0], BLOCK_Q // 8, 8]).permute((1, 0, 2)))


@gluon.jit
def add_dq(dq_desc, dq, row, shared):
    """Add a tile of dQ^T to global memory by TMA, asynchronously.

    dq is as in `store_dq`, and `row` the row of dq_desc at which the tile starts. TMA reads the
    buffer `shared`, which the caller must not overwrite before the addition has read it.
    """
    store_dq(dq, shared)
    fence_async_shared()
    async_atomic_add(dq_desc, [row, 0], shared)
