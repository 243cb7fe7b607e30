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

from systems.kernels.flash_attention.hopper.packed_blocks import packed_block, padded_start
from systems.kernels.flash_attention.hopper.registers import reciprocal
from systems.kernels.flash_attention.triton.mask_ops import seen_by_queries, sequence_rows
from systems.kernels.flash_attention.triton.tile_ops import schedule

BLOCK_Q = gl.constexpr(64)  # number of queries per step
HALF_K = gl.constexpr(64)  # number of keys per consumer


@builtin
def _reduce_add(tensor_desc, coord, src, _semantic=None):
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
class BackwardProblem:
    """Sizes and mask of a launch, and the order of the work items.

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
    left: gl.tensor
    right: gl.tensor
    starts_q: gl.tensor
    starts_k: gl.tensor
    blocks: gl.tensor
    scale_log2e: gl.tensor
    cap_log2e: gl.tensor
    IS_CAUSAL: gl.constexpr
    BOUNDED: gl.constexpr
    LOWER_RIGHT: gl.constexpr
    PACKED: gl.constexpr
    SOFTCAP: gl.constexpr
    Q_PER_KV: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, n_programs, n_heads, n_queries, n_keys, n_padded, n_splits, queries_per_split, group,
        n_items, left, right, starts_q, starts_k, blocks, scale_log2e, cap_log2e, IS_CAUSAL,
        BOUNDED, LOWER_RIGHT, PACKED, SOFTCAP, Q_PER_KV,
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
        self.left = left
        self.right = right
        self.starts_q = starts_q
        self.starts_k = starts_k
        self.blocks = blocks
        self.scale_log2e = scale_log2e
        self.cap_log2e = cap_log2e
        self.IS_CAUSAL = gl.constexpr(IS_CAUSAL)
        self.BOUNDED = gl.constexpr(BOUNDED)
        self.LOWER_RIGHT = gl.constexpr(LOWER_RIGHT)
        self.PACKED = gl.constexpr(PACKED)
        self.SOFTCAP = gl.constexpr(SOFTCAP)
        self.Q_PER_KV = gl.constexpr(Q_PER_KV)

    @gluon.jit
    def locate(self, index):
        """Return the `WorkItem` with this index, in the order of `tile_ops.schedule`."""
        BLOCK_K: gl.constexpr = 2 * HALF_K
        n_queries, n_keys = self.n_queries, self.n_keys
        query_start, padded_query_start, key_start = 0, 0, 0
        if self.PACKED:
            sequence, block, head = packed_block(self.blocks, index, self.n_heads, self.group)
            split = 0
            padded_query_start = padded_start(self.starts_q, sequence, n_queries, BLOCK_Q)
            query_start, n_queries = sequence_rows(self.starts_q, sequence, 1, n_queries, True)
            key_start, n_keys = sequence_rows(self.starts_k, sequence, 1, n_keys, True)
        else:
            block, head, split = schedule(
                index, gl.cdiv(n_keys, BLOCK_K), self.n_programs, self.n_splits,
                self.queries_per_split, self.group, BLOCK_K, self.IS_CAUSAL, True,
            )  # fmt: skip
        first_key = block * BLOCK_K
        first_query = split * self.queries_per_split
        last_query = gl.minimum(first_query + self.queries_per_split, n_queries)
        if self.PACKED:
            last_query = n_queries
        lower, upper = 0, 0
        if self.BOUNDED:
            shift = n_keys - n_queries if self.LOWER_RIGHT else 0
            lower = shift - self.left
            upper = shift + (0 if self.IS_CAUSAL else self.right)
            first, full_start, full_end, last = seen_by_queries(
                first_key, first_query, last_query, lower, upper, BLOCK_Q, BLOCK_K, True, True
            )
            # An item has at least one tile, even if no query sees its keys.
            last_tile = gl.maximum(gl.cdiv(last_query, BLOCK_Q), 1)
            first_tile = gl.minimum(first // BLOCK_Q, last_tile - 1)
            n_tiles = gl.maximum(gl.minimum(gl.cdiv(last, BLOCK_Q), last_tile) - first_tile, 1)
            n_first_masked = gl.minimum(gl.maximum(full_start // BLOCK_Q - first_tile, 0), n_tiles)
            n_full = gl.minimum((full_end - full_start) // BLOCK_Q, n_tiles - n_first_masked)
            if first_key + BLOCK_K > n_keys:
                n_full = n_full * 0  # a tensor, as in the other branch
            n_masked = n_tiles - n_full
            n_first_masked = gl.where(n_full == 0, n_masked, n_first_masked)
        else:
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
            if first_key + BLOCK_K > n_keys:
                n_masked = n_tiles
            n_masked = gl.maximum(gl.minimum(n_masked, n_tiles), 0)
            n_first_masked = n_masked
        return WorkItem(
            gl.to_tensor(split), head, first_key, first_tile, n_tiles, n_masked, n_first_masked,
            gl.to_tensor(query_start), gl.to_tensor(padded_query_start), gl.to_tensor(key_start),
            n_keys, gl.to_tensor(lower), gl.to_tensor(upper), self.BOUNDED,
        )  # fmt: skip


@aggregate
class WorkItem:
    """Keys and queries of a work item.

    Rows of keys and of queries are counted from the start of their sequence. Query i sees the keys
    from i + lower to i + upper. These bounds are set only if the problem is BOUNDED.

    Tiles that need a mask are processed first. These are the tiles in which some queries do not see
    all keys of the work item, and all tiles if the work item has keys past the end. Without a left
    bound, they are the first tiles.
    """

    split: gl.tensor  # index of the range of queries
    head: gl.tensor  # index of the head of k and v, which counts the heads of all batch elements
    first_key: gl.tensor  # first of the 128 keys
    first_tile: gl.tensor  # index of the first tile of 64 queries
    n_tiles: gl.tensor  # number of tiles of each head of q, at least 1
    n_masked: gl.tensor  # number of tiles that need a mask
    n_first_masked: gl.tensor  # number of these before the other tiles; the rest is behind them
    query_start: gl.tensor  # row of the tensor q that has the first query of the sequence
    padded_query_start: gl.tensor  # the same for lse, -delta and dQ, where sequences are padded
    key_start: gl.tensor  # row of the tensor k that has the first key of the sequence
    n_keys: gl.tensor  # number of keys of the sequence
    lower: gl.tensor
    upper: gl.tensor
    BOUNDED: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, split, head, first_key, first_tile, n_tiles, n_masked, n_first_masked, query_start,
        padded_query_start, key_start, n_keys, lower, upper, BOUNDED,
    ):  # fmt: skip
        self.split = split
        self.head = head
        self.first_key = first_key
        self.first_tile = first_tile
        self.n_tiles = n_tiles
        self.n_masked = n_masked
        self.n_first_masked = n_first_masked
        self.query_start = query_start
        self.padded_query_start = padded_query_start
        self.key_start = key_start
        self.n_keys = n_keys
        self.lower = lower
        self.upper = upper
        self.BOUNDED = gl.constexpr(BOUNDED)

    @gluon.jit
    def tile(self, i):
        """Return the index of the tile of queries that is processed in step i of a head of q."""
        found = self.first_tile + i
        if self.BOUNDED:
            n_last_masked = self.n_masked - self.n_first_masked
            n_full = self.n_tiles - self.n_masked
            after = gl.where(i < self.n_masked, n_full, -n_last_masked)
            found += gl.where(i < self.n_first_masked, 0, after)
        return found


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
    shared, problem, q_desc, do_desc, k_desc, v_desc, lse_desc, minus_delta_desc, index, turn, n,
    KV_SLOTS: gl.constexpr, Q_SLOTS: gl.constexpr,
):  # fmt: skip
    """Load the tensors of one work item into shared memory by TMA, asynchronously.

    The producer warp calls this function. For each load, it first waits until the slot in shared
    memory is empty.

    Args:
        shared: `Shared`, the rings of slots in shared memory.
        problem: `BackwardProblem`.
        q_desc, do_desc, k_desc, v_desc, lse_desc, minus_delta_desc: TMA descriptors of the loaded
            tensors.
        index: index of the work item.
        turn: number of work items that this program has already processed.
        n: number of tiles of queries in these earlier work items.
        KV_SLOTS: number of slots for K and V.
        Q_SLOTS: number of slots for tiles of queries.

    Returns:
        Value of n for the next work item.
    """
    HEAD_DIM: gl.constexpr = k_desc.block_type.shape[3]
    row_bytes: gl.constexpr = 2 * HEAD_DIM * k_desc.dtype.primitive_bitwidth // 8
    item = problem.locate(index)
    batch = item.head // problem.n_heads
    head = item.head % problem.n_heads
    kv_slot = turn % KV_SLOTS
    mbarrier.wait(shared.kv_empty.index(kv_slot), (turn // KV_SLOTS) & 1 ^ 1)
    for half in gl.static_range(2):
        place = 2 * kv_slot + half
        key = item.key_start + item.first_key + half * HALF_K
        kv_full = shared.kv_full.index(place)
        mbarrier.expect(kv_full, HALF_K * row_bytes)
        _copy(k_desc, [batch, head, key, 0], kv_full, shared.k.index(place))
        _copy(v_desc, [batch, head, key, 0], kv_full, shared.v.index(place))
    for which in range(problem.Q_PER_KV):
        q_head = head * problem.Q_PER_KV + which
        before = (item.head * problem.Q_PER_KV + which) * problem.n_padded
        for i in range(item.n_tiles):
            step = n + which * item.n_tiles + i
            slot = step % Q_SLOTS
            row = item.tile(i) * BLOCK_Q
            padded_row = before + item.padded_query_start + row
            row += item.query_start
            q_full = shared.q_full.index(slot)
            mbarrier.wait(shared.q_empty.index(slot), (step // Q_SLOTS) & 1 ^ 1)
            mbarrier.expect(q_full, BLOCK_Q * (row_bytes + 8))  # + 8 bytes: lse and minus_delta
            _copy(q_desc, [batch, q_head, row, 0], q_full, shared.q.index(slot))
            _copy(do_desc, [batch, q_head, row, 0], q_full, shared.do.index(slot))
            _copy(lse_desc, [padded_row], q_full, shared.lse.index(slot))
            _copy(minus_delta_desc, [padded_row], q_full, shared.minus_delta.index(slot))
    return n + problem.Q_PER_KV * item.n_tiles


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

    `prepare_kernel` has stored the 64 numbers in an order in which each four numbers of a thread
    are contiguous, and in which the threads that load together use different banks.

    Args:
        shared: the 64 numbers in shared memory, as stored by `prepare_kernel`.
        layout: register layout of a tile of S^T, with one column per query. Number i of the result
            belongs to column i.
    """
    loaded: gl.constexpr = gl.DistributedLinearLayout(
        [[1], [2], [16], [32]], [[4], [8], [0], [0], [0]], [[0], [0]], [], [BLOCK_Q]
    )
    row = shared.load(loaded).reshape([BLOCK_Q // 16, 4, 2, 2]).permute((0, 2, 1, 3))
    return gl.convert_layout(row.reshape([BLOCK_Q]), gl.SliceLayout(0, layout), assert_trivial=True)


@gluon.jit
def add_dq(dq_desc, dq, row, shared):
    """Add a tile of dQ^T to global memory by TMA, asynchronously.

    The tile is stored as (8, 64, 8), with 8 queries contiguous. The threads that store together
    then use different banks of shared memory, as they do not in the swizzled layouts of TMA. The
    sum in global memory has the same order, which `convert_kernel` undoes.

    Args:
        dq_desc: TMA descriptor of the float32 sum of dQ in global memory.
        dq: float32 (64 of head_dim, 64 queries), in registers.
        row: row of dq_desc at which the tile starts.
        shared: buffer in shared memory, which TMA reads. The caller must not overwrite it before
            the addition has read it.
    """
    order: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[2, 1, 0])
    tile = shared._reinterpret(gl.float32, [BLOCK_Q // 8, dq.shape[0], 8], order)
    tile.store(dq.reshape([dq.shape[0], BLOCK_Q // 8, 8]).permute((1, 0, 2)))
    fence_async_shared()
    _reduce_add(dq_desc, [row, 0], shared)


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
def probabilities(s, lse, problem, item, first_key, first_query, MASKED: gl.constexpr):
    """Return P^T of a tile, and P^T times the derivative of the capped by the scaled scores.

    Without a softcap, this derivative is 1. With a softcap, tanh(x) is 1 - 2 r with r = 1 / (1 +
    exp(2 x)), and its derivative is 4 (r - r^2).

    Args:
        s: S^T, float32 (keys, queries), in registers.
        lse: log-sum-exp of the queries in base 2.
        problem: `BackwardProblem`.
        item: `WorkItem`.
        first_key, first_query: index of the first key and of the first query of the tile.
        MASKED: whether the tile needs a mask.
    """
    if problem.SOFTCAP:
        r = reciprocal(1.0 + gl.exp2(s * problem.scale_log2e))
        p = gl.exp2(r * (-2.0 * problem.cap_log2e) + (problem.cap_log2e - lse)[None, :])
    else:
        p = gl.exp2(s * problem.scale_log2e - lse[None, :])
    if MASKED:
        p = _hide(p, problem, item, first_key, first_query)
    weighted = p
    if problem.SOFTCAP:
        weighted = p * (4.0 * (r - r * r))
    return p, weighted


@gluon.jit
def _hide(p, problem, item, first_key, first_query):
    """Set the elements of a tile of P^T that belong to hidden or missing keys to zero.

    P^T is the transposed matrix of probabilities. A key is hidden from a query if the mask excludes
    it. A key is missing if the tile extends past the last key. The score of a missing key is 0, so
    its probability would be exp2(-lse). This value may be inf, and the matmul for dQ would then
    compute inf * 0 = NaN.
    """
    layout: gl.constexpr = p.type.layout
    keys = first_key + gl.arange(0, p.shape[0], gl.SliceLayout(1, layout))
    visible = (keys < item.n_keys)[:, None]
    if problem.IS_CAUSAL or problem.BOUNDED:
        queries = first_query + gl.arange(0, p.shape[1], gl.SliceLayout(0, layout))
        visible = visible & (keys[:, None] <= (queries + item.upper)[None, :])
    if problem.BOUNDED:
        visible = visible & (keys[:, None] >= (queries + item.lower)[None, :])
    return gl.where(visible, p, 0.0)
