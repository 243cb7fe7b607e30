"""Code shared by both backward kernels for Hopper: work items, rings in shared memory, TMA copies.

A work item consists of a block of 128 keys of one head and of the queries that see these keys. If
the queries are split into ranges, a work item has only the queries of one range. Two consumer
warpgroups process 64 keys each, called the halves of the item. In each step, a consumer processes a
tile of 64 queries.

Warpgroups pass data through rings of slots in shared memory. Each slot has two mbarriers: readers
wait on `full` before they read the slot, and writers wait on `empty` before they overwrite it.

The uses of a ring are numbered from 0. In a ring with S slots, use n takes slot n % S, and is phase
n // S of both mbarriers of this slot. Readers wait on `full` with the parity of this phase. Writers
wait for the previous phase of `empty`, which has the opposite parity. Before the first use of a
slot, this wait returns at once.
"""

# Kernel arguments have Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

# No `from __future__ import annotations`: an aggregate needs the types of its fields, not strings.
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)
from triton.language.core import _aggregate as aggregate

from systems.kernels.flash_attention.triton.tile_ops import schedule

BLOCK_Q = gl.constexpr(64)  # number of queries per step
HALF_K = gl.constexpr(64)  # number of keys per consumer


@builtin
def reduce_add(tensor_desc, coord, src, _semantic=None):
    """Add a tile in shared memory to global memory by TMA, asynchronously.

    Gluon's `tma` module has no function for this.
    """
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle
    )


@aggregate
class ProblemShape:
    """Sizes of a launch.

    The fields are described at the arguments of `backward_kernel` with the same names.
    """

    n_programs: gl.tensor
    n_heads: gl.tensor
    n_queries: gl.tensor
    n_keys: gl.tensor
    n_padded: gl.tensor
    n_splits: gl.tensor
    queries_per_split: gl.tensor
    group: gl.tensor
    n_items: gl.tensor
    IS_CAUSAL: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, n_programs, n_heads, n_queries, n_keys, n_padded, n_splits, queries_per_split, group,
        n_items, IS_CAUSAL,
    ):  # fmt: skip
        self.n_programs = n_programs
        self.n_heads = n_heads
        self.n_queries = n_queries
        self.n_keys = n_keys
        self.n_padded = n_padded
        self.n_splits = n_splits
        self.queries_per_split = queries_per_split
        self.group = group
        self.n_items = n_items
        self.IS_CAUSAL = gl.constexpr(IS_CAUSAL)

    @gluon.jit
    def locate(self, item):
        """Return (split, head, first key, first tile, number of tiles, number of masked tiles).

        These describe one work item. The work items are in the order of `tile_ops.schedule`. `head`
        counts the heads of all batch elements. Tiles consist of queries. The masked tiles come
        first.
        """
        BLOCK_K: gl.constexpr = 2 * HALF_K
        block, head, split = schedule(
            item, gl.cdiv(self.n_keys, BLOCK_K), self.n_programs, self.n_splits,
            self.queries_per_split, self.group, BLOCK_K, self.IS_CAUSAL, True,
        )  # fmt: skip
        first_key = block * BLOCK_K
        first_query = split * self.queries_per_split
        last_query = gl.minimum(first_query + self.queries_per_split, self.n_queries)
        last_tile = gl.cdiv(last_query, BLOCK_Q)
        first_tile = first_query // BLOCK_Q
        if self.IS_CAUSAL:
            # An item has at least one tile, even if no query of its split sees its keys.
            seen = gl.minimum(first_key // BLOCK_Q, last_tile - 1)
            first_tile = gl.maximum(first_tile, seen)
        n_tiles = last_tile - first_tile
        n_masked = 0
        if self.IS_CAUSAL:
            n_masked = (first_key + BLOCK_K) // BLOCK_Q - first_tile
        if first_key + BLOCK_K > self.n_keys:
            n_masked = n_tiles
        n_masked = gl.maximum(gl.minimum(n_masked, n_tiles), 0)
        return split, head, first_key, first_tile, n_tiles, n_masked


@aggregate
class Shared:
    """Rings in shared memory and their mbarriers. The first dimension is the slot."""

    k: gl.shared_memory_descriptor  # (2 * slots, 64, head_dim), two halves per slot
    v: gl.shared_memory_descriptor  # as k
    q: gl.shared_memory_descriptor  # (slots, 64, head_dim)
    do: gl.shared_memory_descriptor  # as q
    lse: gl.shared_memory_descriptor  # float32 (slots, 64), in base 2
    minus_delta: gl.shared_memory_descriptor  # float32 (slots, 64)
    ds: gl.shared_memory_descriptor  # (2 * slots, 64 keys, 64 queries), two halves per slot
    dq: gl.shared_memory_descriptor  # float32 (slots, 64 of head_dim, 64 queries)
    kv_full: gl.shared_memory_descriptor  # (2 * slots), one for each half of k and v
    kv_empty: gl.shared_memory_descriptor  # (slots)
    q_full: gl.shared_memory_descriptor  # (slots), one for q, do, lse and minus_delta together
    q_empty: gl.shared_memory_descriptor  # (slots)
    ds_full: gl.shared_memory_descriptor  # (2 * slots), one for each half
    ds_empty: gl.shared_memory_descriptor  # (slots)

    @gluon.constexpr_function
    def __init__(
        self, k, v, q, do, lse, minus_delta, ds, dq,
        kv_full, kv_empty, q_full, q_empty, ds_full, ds_empty,
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


@gluon.jit
def barriers(n: gl.constexpr, count: gl.constexpr):
    """Allocate n mbarriers, each of which completes a phase after `count` arrivals."""
    made = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(made.index(i), count=count)
    return made


@gluon.jit
def allocate(
    q_desc, k_desc, lse_desc, dq_desc,
    KV_SLOTS: gl.constexpr, Q_SLOTS: gl.constexpr, DS_SLOTS: gl.constexpr, DQ_SLOTS: gl.constexpr,
    KV_READERS: gl.constexpr, DS_READERS: gl.constexpr,
):  # fmt: skip
    """Allocate the rings in shared memory and their mbarriers.

    Args:
        *_SLOTS: number of slots of each ring.
        KV_READERS: number of warpgroups that read K or V.
        DS_READERS: number of warpgroups that read dS.
    """
    HEAD_DIM: gl.constexpr = k_desc.block_type.shape[3]
    dtype: gl.constexpr = k_desc.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, HEAD_DIM], dtype)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF_K, BLOCK_Q], dtype)
    k_shape: gl.constexpr = [2 * KV_SLOTS, HALF_K, HEAD_DIM]
    q_shape: gl.constexpr = [Q_SLOTS, BLOCK_Q, HEAD_DIM]
    row_shape: gl.constexpr = [Q_SLOTS, BLOCK_Q]
    dq_shape: gl.constexpr = [DQ_SLOTS, dq_desc.block_type.shape[0], BLOCK_Q]
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
        barriers(Q_SLOTS, 1),
        barriers(Q_SLOTS, 2),
        barriers(2 * DS_SLOTS, 1),
        barriers(DS_SLOTS, DS_READERS),
    )


@gluon.jit
def _copy(desc, coord, barrier, shared):
    """Load a tile into shared memory by TMA, asynchronously.

    The tiles of the descriptor have leading dimensions of size 1, which `shared` does not have.
    """
    tile = shared._reinterpret(desc.dtype, desc.block_type.shape, desc.layout)
    tma.async_copy_global_to_shared(desc, coord, barrier, tile)


@gluon.jit
def load_item(
    shared, problem, q_desc, do_desc, k_desc, v_desc, lse_desc, minus_delta_desc, item, turn, n,
    KV_SLOTS: gl.constexpr, Q_SLOTS: gl.constexpr,
):  # fmt: skip
    """Issue the TMA loads of one work item, each as soon as its slot is empty.

    The producer warp calls this function.

    Args:
        turn: number of earlier work items of this program.
        n: number of steps of all earlier work items.

    Returns:
        n for the next work item.
    """
    HEAD_DIM: gl.constexpr = k_desc.block_type.shape[3]
    row_bytes: gl.constexpr = 2 * HEAD_DIM * k_desc.dtype.primitive_bitwidth // 8
    _, item_head, first_key, first_tile, n_tiles, _ = problem.locate(item)
    batch = item_head // problem.n_heads
    head = item_head % problem.n_heads
    kv_slot = turn % KV_SLOTS
    mbarrier.wait(shared.kv_empty.index(kv_slot), (turn // KV_SLOTS) & 1 ^ 1)
    for half in gl.static_range(2):
        place = 2 * kv_slot + half
        key = first_key + half * HALF_K
        kv_full = shared.kv_full.index(place)
        mbarrier.expect(kv_full, HALF_K * row_bytes)
        _copy(k_desc, [batch, head, key, 0], kv_full, shared.k.index(place))
        _copy(v_desc, [batch, head, key, 0], kv_full, shared.v.index(place))
    for i in range(n_tiles):
        slot = (n + i) % Q_SLOTS
        row = (first_tile + i) * BLOCK_Q
        padded_row = item_head * problem.n_padded + row
        q_full = shared.q_full.index(slot)
        mbarrier.wait(shared.q_empty.index(slot), ((n + i) // Q_SLOTS) & 1 ^ 1)
        mbarrier.expect(q_full, BLOCK_Q * (row_bytes + 8))  # + 8 bytes: lse and minus_delta
        _copy(q_desc, [batch, head, row, 0], q_full, shared.q.index(slot))
        _copy(do_desc, [batch, head, row, 0], q_full, shared.do.index(slot))
        _copy(lse_desc, [padded_row], q_full, shared.lse.index(slot))
        _copy(minus_delta_desc, [padded_row], q_full, shared.minus_delta.index(slot))
    return n + n_tiles


@gluon.jit
def send(desc, coord, value, shared):
    """Store a tile to global memory by TMA, asynchronously, through the buffer `shared`.

    The tiles of the descriptor have leading dimensions of size 1, which `shared` does not have.
    Rows past the end of the tensor are not written.
    """
    shared.store(value.to(desc.dtype))
    fence_async_shared()
    tile = shared._reinterpret(desc.dtype, desc.block_type.shape, desc.layout)
    tma.async_copy_shared_to_global(desc, coord, tile)


@gluon.jit
def row_of(shared, layout: gl.constexpr):
    """Load lse or -delta of a tile of queries, one number for each column of `layout`.

    `prepare_kernel` stores the 64 numbers in an order in which the 16 numbers of each thread are
    contiguous. So a thread can read them with wide loads.
    """
    loaded: gl.constexpr = gl.DistributedLinearLayout(
        [[1], [2], [4], [8]], [[16], [32], [0], [0], [0]], [[0], [0]], [], [BLOCK_Q]
    )
    row = shared.load(loaded).reshape([4, BLOCK_Q // 8, 2]).permute((1, 0, 2)).reshape([BLOCK_Q])
    return gl.convert_layout(row, gl.SliceLayout(0, layout), assert_trivial=True)


@gluon.jit
def times(a, b, layout: gl.constexpr):
    """Issue the asynchronous WGMMA a b^T, and return its result.

    The caller must wait for the WGMMA before it uses the result.
    """
    ROWS: gl.constexpr = a.shape[0]
    COLUMNS: gl.constexpr = b.shape[0]
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    return warpgroup_mma(a, b.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def hide(p, first_key, first_query, n_keys, IS_CAUSAL: gl.constexpr):
    """Set P^T to zero for keys that a query does not see, and for keys past the end.

    Keys past the end have a score of 0, so their P would be exp2(-lse). This may be inf, and inf *
    0 in the matmul for dQ would be NaN.
    """
    layout: gl.constexpr = p.type.layout
    keys = first_key + gl.arange(0, p.shape[0], gl.SliceLayout(1, layout))
    visible = (keys < n_keys)[:, None]
    if IS_CAUSAL:
        queries = first_query + gl.arange(0, p.shape[1], gl.SliceLayout(0, layout))
        visible = visible & (keys[:, None] <= queries[None, :])
    return gl.where(visible, p, 0.0)


@gluon.jit
def store_rows(pointer, value, first, n_rows, row_stride):
    """Store a tile (rows, head_dim) from row `first` on, except rows past n_rows."""
    layout: gl.constexpr = value.type.layout
    row = gl.arange(0, value.shape[0], gl.SliceLayout(1, layout))
    column = gl.arange(0, value.shape[1], gl.SliceLayout(0, layout))
    pointers = pointer + (first + row).to(gl.int64)[:, None] * row_stride + column[None, :]
    gl.store(pointers, value.to(pointer.dtype.element_ty), mask=(first + row < n_rows)[:, None])
