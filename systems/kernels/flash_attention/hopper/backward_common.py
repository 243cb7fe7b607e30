"""Code shared by both backward kernels for Hopper: work items, rings in shared memory, TMA copies.

A work item is a block of 128 keys of one head of k and v, together with the queries that see these
keys. If several heads of q have this head of k and v in common, the work item has the queries of
all of them, one head after another. If the queries are split into ranges, a work item has only the
queries of one range. Two consumer warpgroups process 64 keys each. These 64 keys are called a half
of the work item. In each step, a consumer processes a tile of 64 queries.

Warpgroups pass data to each other through rings. A ring is a fixed number of slots in shared memory
that are used in turn. mbarriers protect the slots: readers wait on `full` before they read a slot,
and writers wait on `empty` before they overwrite it. A slot with two halves has one `full` for each
half. The ring of dQ has no mbarriers: a single warpgroup writes each of its slots, and waits until
TMA has read a slot before it overwrites the slot.

The uses of a ring are numbered from 0. In a ring with S slots, use number n takes slot n % S. It is
phase n // S of the mbarriers of this slot. Readers wait for this phase of `full`, with its parity.
Writers wait for the previous phase of `empty`, which has the opposite parity. Before the first use
of a slot, the wait of the writers returns at once.
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

    Gluon's `tma` module has no function that adds.

    Args:
        tensor_desc: TMA descriptor of the tensor in global memory.
        coord: coordinates of the tile in the tensor.
        src: tile in shared memory.
    """
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle
    )


@aggregate
class ProblemShape:
    """Numbers of a launch that describe the sizes of the tensors and the order of the work items.

    The fields have the names and meanings of arguments of `backward_kernel.backward_kernel`.
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
    Q_PER_KV: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, n_programs, n_heads, n_queries, n_keys, n_padded, n_splits, queries_per_split, group,
        n_items, IS_CAUSAL, Q_PER_KV,
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
        self.Q_PER_KV = gl.constexpr(Q_PER_KV)

    @gluon.jit
    def locate(self, item):
        """Return the keys and queries of a work item.

        Args:
            item: index of the work item, in the order of `tile_ops.schedule`.

        Returns:
            split: index of the range of queries.
            head: index of the head of k and v, which counts the heads of all batch elements.
            first_key: index of the first of the 128 keys.
            first_tile: index of the first tile of 64 queries.
            n_tiles: number of tiles of each head of q, at least 1.
            n_masked: number of tiles that need a mask, because some of their queries do not see all
                keys of the work item, or because keys are past the end. These tiles come first.
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
    KV_READERS: gl.constexpr, DS_READERS: gl.constexpr,
):  # fmt: skip
    """Allocate the rings of slots in shared memory and their mbarriers.

    Args:
        q_desc, k_desc, lse_desc, dq_desc: TMA descriptors, which give the dtypes, tile sizes and
            layouts.
        KV_SLOTS: number of slots of the ring of K and V.
        Q_SLOTS: number of slots of the ring of Q, dO, lse and -delta.
        DS_SLOTS: number of slots of the ring of dS^T.
        DQ_SLOTS: number of slots of the ring of dQ^T.
        KV_READERS: number of warpgroups that read K or V.
        DS_READERS: number of warpgroups that read dS^T.

    Returns:
        `Shared`, the rings and mbarriers.
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
    """Load a tile from global into shared memory by TMA, asynchronously.

    Args:
        desc: TMA descriptor of the tensor in global memory.
        coord: coordinates of the tile in the tensor.
        barrier: mbarrier that TMA notifies when it has written the tile.
        shared: tile in shared memory. It may lack leading dimensions of size 1 that the tiles of
            desc have.
    """
    tile = shared._reinterpret(desc.dtype, desc.block_type.shape, desc.layout)
    tma.async_copy_global_to_shared(desc, coord, barrier, tile)


@gluon.jit
def load_item(
    shared, problem, q_desc, do_desc, k_desc, v_desc, lse_desc, minus_delta_desc, item, turn, n,
    KV_SLOTS: gl.constexpr, Q_SLOTS: gl.constexpr,
):  # fmt: skip
    """Load the tensors of one work item into shared memory by TMA, asynchronously.

    The producer warp calls this function. For each load, it first waits until the slot in shared
    memory is empty.

    Args:
        shared: `Shared`, the rings of slots in shared memory.
        problem: `ProblemShape`.
        q_desc, do_desc, k_desc, v_desc, lse_desc, minus_delta_desc: TMA descriptors of the loaded
            tensors.
        item: index of the work item.
        turn: number of work items that this program has already processed.
        n: number of tiles of queries in these earlier work items.
        KV_SLOTS: number of slots for K and V.
        Q_SLOTS: number of slots for tiles of queries.

    Returns:
        Value of n for the next work item.
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
    for which in range(problem.Q_PER_KV):
        q_head = head * problem.Q_PER_KV + which
        before = (item_head * problem.Q_PER_KV + which) * problem.n_padded
        for i in range(n_tiles):
            step = n + which * n_tiles + i
            slot = step % Q_SLOTS
            row = (first_tile + i) * BLOCK_Q
            padded_row = before + row
            q_full = shared.q_full.index(slot)
            mbarrier.wait(shared.q_empty.index(slot), (step // Q_SLOTS) & 1 ^ 1)
            mbarrier.expect(q_full, BLOCK_Q * (row_bytes + 8))  # + 8 bytes: lse and minus_delta
            _copy(q_desc, [batch, q_head, row, 0], q_full, shared.q.index(slot))
            _copy(do_desc, [batch, q_head, row, 0], q_full, shared.do.index(slot))
            _copy(lse_desc, [padded_row], q_full, shared.lse.index(slot))
            _copy(minus_delta_desc, [padded_row], q_full, shared.minus_delta.index(slot))
    return n + problem.Q_PER_KV * n_tiles


@gluon.jit
def send(desc, coord, value, shared):
    """Store a tile to global memory by TMA, asynchronously.

    Rows past the end of the tensor are not written. The tiles of desc have leading dimensions of
    size 1, which `value` and `shared` do not have.

    Args:
        desc: TMA descriptor of the tensor in global memory.
        coord: coordinates of the tile in the tensor.
        value: tile in registers. It is converted to the dtype of desc.
        shared: buffer in shared memory, which TMA reads. The caller must not overwrite it before
            the store has read it.
    """
    shared.store(value.to(desc.dtype))
    fence_async_shared()
    tile = shared._reinterpret(desc.dtype, desc.block_type.shape, desc.layout)
    tma.async_copy_shared_to_global(desc, coord, tile)


@gluon.jit
def row_of(shared, layout: gl.constexpr):
    """Load lse or -delta of a tile of 64 queries from shared memory, one number per query.

    `prepare_kernel` has stored the 64 numbers in an order in which the 16 numbers of each thread
    are contiguous. This allows wide loads.

    Args:
        shared: the 64 numbers in shared memory, as stored by `prepare_kernel`.
        layout: register layout of a tile of S^T, with one column per query. Number i of the result
            belongs to column i.
    """
    loaded: gl.constexpr = gl.DistributedLinearLayout(
        [[1], [2], [4], [8]], [[16], [32], [0], [0], [0]], [[0], [0]], [], [BLOCK_Q]
    )
    row = shared.load(loaded).reshape([4, BLOCK_Q // 8, 2]).permute((1, 0, 2)).reshape([BLOCK_Q])
    return gl.convert_layout(row, gl.SliceLayout(0, layout), assert_trivial=True)


@gluon.jit
def times(a, b, layout: gl.constexpr):
    """Issue the asynchronous WGMMA a b^T, and return its result, float32 (rows of a, rows of b).

    The caller must wait for the WGMMA before it uses the result.

    Args:
        a: left operand, in registers or in shared memory.
        b: right operand before it is transposed, in shared memory.
        layout: register layout of the result.
    """
    ROWS: gl.constexpr = a.shape[0]
    COLUMNS: gl.constexpr = b.shape[0]
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    return warpgroup_mma(a, b.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def hide(p, first_key, first_query, n_keys, IS_CAUSAL: gl.constexpr):
    """Set the elements of a tile of P^T that belong to hidden or missing keys to zero.

    P^T is the transposed matrix of probabilities. A key is hidden from a query if the causal mask
    excludes it. A key is missing if the tile extends past the last key. The score of a missing key
    is 0, so its probability would be exp2(-lse). This value may be inf, and the matmul for dQ would
    then compute inf * 0 = NaN.

    Args:
        p: tile of P^T, (keys, queries), in registers.
        first_key, first_query: index of the first key and of the first query of the tile.
        n_keys: number of keys of the head.
        IS_CAUSAL: whether query i sees only the keys 0 to i.

    Returns:
        The tile with these zeros.
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
    """Store a tile to global memory, except the rows that are past the end of the tensor.

    Args:
        pointer: address of row 0 of the tensor, whose rows are contiguous.
        value: tile (rows, head_dim), in registers. It is converted to the dtype of the tensor.
        first: index of the row at which the tile starts.
        n_rows: number of rows of the tensor.
        row_stride: stride between rows, in elements.
    """
    layout: gl.constexpr = value.type.layout
    row = gl.arange(0, value.shape[0], gl.SliceLayout(1, layout))
    column = gl.arange(0, value.shape[1], gl.SliceLayout(0, layout))
    pointers = pointer + (first + row).to(gl.int64)[:, None] * row_stride + column[None, :]
    gl.store(pointers, value.to(pointer.dtype.element_ty), mask=(first + row < n_rows)[:, None])
