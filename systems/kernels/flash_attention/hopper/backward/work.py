"""Work items of the Hopper backward kernels: their keys, and the queries that see these keys.

A work item is a block of keys of one head of k and v, together with the queries that see these
keys. If several heads of q have this head of k and v in common, a work item has the queries of
Q_PER_ITEM of them, one head after another. If the queries are split into ranges (splits), it has
only those of one range. In each step, a consumer warpgroup processes a tile of 64 queries.

Up to head_dim 128, a block has 128 keys, and each of two consumers processes 64 of them. These 64
keys are called a half of the work item. With larger head dimensions, a block has 96 keys
(`backward.d192`) or 64 keys (`backward.d256`).
"""

# Kernel arguments have Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

# No `from __future__ import annotations`: an aggregate needs the types of its fields, not strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

from systems.kernels.flash_attention.hopper.packed_blocks import packed_block, padded_start
from systems.kernels.flash_attention.triton.mask_ops import seen_by_queries, sequence_rows
from systems.kernels.flash_attention.triton.tile_ops import schedule

BLOCK_Q = gl.constexpr(64)  # number of queries per step
HALF_K = gl.constexpr(64)  # number of keys per consumer


@aggregate
class BackwardProblem:
    """Sizes and mask of a launch, and the order of the work items.

    The fields have the names and meanings of arguments of `backward.d64.backward_kernel`.
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
    turns: gl.tensor
    IS_CAUSAL: gl.constexpr
    BOUNDED: gl.constexpr
    LOWER_RIGHT: gl.constexpr
    PACKED: gl.constexpr
    SOFTCAP: gl.constexpr
    Q_PER_ITEM: gl.constexpr  # number of heads of q of a work item
    ITEMS_PER_KV: gl.constexpr  # number of work items with the same keys in each split
    DETERMINISTIC: gl.constexpr
    BLOCK_K: gl.constexpr  # number of keys of a work item

    @gluon.constexpr_function
    def __init__(
        self, n_programs, n_heads, n_queries, n_keys, n_padded, n_splits, queries_per_split, group,
        n_items, left, right, starts_q, starts_k, blocks, scale_log2e, cap_log2e, turns, IS_CAUSAL,
        BOUNDED, LOWER_RIGHT, PACKED, SOFTCAP, Q_PER_KV, Q_PER_ITEM, DETERMINISTIC, BLOCK_K,
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
        self.turns = turns
        self.IS_CAUSAL = gl.constexpr(IS_CAUSAL)
        self.BOUNDED = gl.constexpr(BOUNDED)
        self.LOWER_RIGHT = gl.constexpr(LOWER_RIGHT)
        self.PACKED = gl.constexpr(PACKED)
        self.SOFTCAP = gl.constexpr(SOFTCAP)
        self.Q_PER_ITEM = gl.constexpr(Q_PER_ITEM)
        self.ITEMS_PER_KV = gl.constexpr(Q_PER_KV // Q_PER_ITEM)
        self.DETERMINISTIC = gl.constexpr(DETERMINISTIC)
        self.BLOCK_K = gl.constexpr(BLOCK_K)

    @gluon.jit
    def locate(self, index):
        """Return the `WorkItem` with this index, in the order of `tile_ops.schedule`.

        If DETERMINISTIC is True, the blocks of keys of a head are in descending order.
        """
        BLOCK_K: gl.constexpr = self.BLOCK_K
        n_queries, n_keys = self.n_queries, self.n_keys
        query_start, padded_query_start, key_start = 0, 0, 0
        if self.PACKED:
            sequence, block, head = packed_block(self.blocks, index, self.n_heads, self.group)
            split = 0
            padded_query_start = padded_start(self.starts_q, sequence, n_queries, BLOCK_Q)
            query_start, n_queries = sequence_rows(self.starts_q, sequence, 1, n_queries, True)
            key_start, n_keys = sequence_rows(self.starts_k, sequence, 1, n_keys, True)
        else:
            n_blocks = gl.cdiv(n_keys, BLOCK_K)
            block, head, split = schedule(
                index, n_blocks, self.n_programs, self.n_splits, self.queries_per_split,
                self.group, BLOCK_K, self.IS_CAUSAL and not self.DETERMINISTIC, True,
            )  # fmt: skip
            if self.DETERMINISTIC:
                block = n_blocks - 1 - block
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
                n_masked = gl.cdiv(first_key + BLOCK_K - 1, BLOCK_Q) - first_tile
            if first_key + BLOCK_K > n_keys:
                n_masked = n_tiles
            n_masked = gl.maximum(gl.minimum(n_masked, n_tiles), 0)
            n_first_masked = n_masked
        return WorkItem(
            head, first_key, first_tile, n_tiles, n_masked, n_first_masked,
            gl.to_tensor(query_start), gl.to_tensor(padded_query_start), gl.to_tensor(key_start),
            n_keys, gl.to_tensor(lower), gl.to_tensor(upper), self.BOUNDED, self.DETERMINISTIC,
        )  # fmt: skip


@aggregate
class WorkItem:
    """Keys and queries of a work item.

    Rows of keys and of queries are counted from the start of their sequence. Query i sees the keys
    from i + lower to i + upper. These bounds are set only if the problem is BOUNDED.

    Tiles that need a mask are processed first. These are the tiles in which some queries do not see
    all keys of the work item, and all tiles if the work item has keys past the end. If the problem
    is BOUNDED, an incomplete last tile is one, too. Otherwise, they are the first tiles.

    If ASCENDING is True, tiles are processed in ascending order. With bounds, all have a mask then.
    """

    # Index among the heads of q, Q_PER_ITEM of which count as one, of all batch elements
    head: gl.tensor
    first_key: gl.tensor  # first key of the block
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
    ASCENDING: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, head, first_key, first_tile, n_tiles, n_masked, n_first_masked, query_start,
        padded_query_start, key_start, n_keys, lower, upper, BOUNDED, ASCENDING,
    ):  # fmt: skip
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
        self.ASCENDING = gl.constexpr(ASCENDING)

    @gluon.jit
    def n_first(self):
        """Return the number of tiles that are processed first, with a mask."""
        return self.n_tiles if self.BOUNDED and self.ASCENDING else self.n_masked

    @gluon.jit
    def tile(self, i):
        """Return the index of the tile of queries that is processed in step i of a head of q."""
        found = self.first_tile + i
        if self.BOUNDED and not self.ASCENDING:
            n_last_masked = self.n_masked - self.n_first_masked
            n_full = self.n_tiles - self.n_masked
            after = gl.where(i < self.n_masked, n_full, -n_last_masked)
            found += gl.where(i < self.n_first_masked, 0, after)
        return found


@gluon.jit
def row_before(problem, item, row, i, HEAD_DIM: gl.constexpr):
    """Return the row at which a consumer's part of dQ^T of the previous tile starts.

    It is a row of the sum of dQ. The sum has HEAD_DIM rows for each tile of 64 queries. `row` is
    that for tile 0 of the head of q. i is the number of tiles of this head before the present one.
    The tile before the first one is the last tile of the previous head.
    """
    if problem.BOUNDED:
        found = row + item.tile(gl.where(i == 0, item.n_tiles, i) - 1) * HEAD_DIM
        if problem.Q_PER_ITEM > 1:
            found -= gl.where(i == 0, problem.n_padded // BLOCK_Q * HEAD_DIM, 0)
    else:
        found = row + (item.first_tile + i - 1) * HEAD_DIM
        if problem.Q_PER_ITEM > 1:
            gap = (problem.n_padded // BLOCK_Q - item.n_tiles) * HEAD_DIM
            found -= gl.where(i == 0, gap, 0)
    return found
