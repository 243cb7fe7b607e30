"""Work items of the Hopper forward kernel: their queries and keys, and how programs take them.

A work item is a block of CONSUMERS * 64 queries of one head, with the keys that they see. If the
keys are split into ranges (splits), a work item has the keys of one range. With packed sequences,
the queries and keys of a work item belong to one sequence.
"""

# Kernel arguments have Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

# No `from __future__ import annotations`: an aggregate needs the types of its fields, not strings.
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

from systems.kernels.flash_attention.hopper.packed_blocks import packed_block
from systems.kernels.flash_attention.triton.mask_ops import seen_keys, sequence_rows
from systems.kernels.flash_attention.triton.tile_ops import schedule

ROWS = gl.constexpr(64)  # number of queries per consumer: the rows of a WGMMA


@aggregate
class ForwardProblem:
    """Sizes and mask of a launch of the forward kernel, and the order of its work items.

    The fields have the names and meanings of arguments of `forward.kernel.hopper_forward_kernel`.
    """

    n_work: gl.tensor
    n_programs: gl.tensor
    n_heads: gl.tensor
    n_queries: gl.tensor
    n_keys: gl.tensor
    n_splits: gl.tensor
    keys_per_split: gl.tensor
    group: gl.tensor
    left: gl.tensor
    right: gl.tensor
    starts_q: gl.tensor
    starts_k: gl.tensor
    blocks: gl.tensor
    CONSUMERS: gl.constexpr
    BLOCK_K: gl.constexpr
    IS_CAUSAL: gl.constexpr
    SPLIT: gl.constexpr
    Q_PER_KV: gl.constexpr
    BOUNDED: gl.constexpr
    LOWER_RIGHT: gl.constexpr
    PACKED: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, n_work, n_programs, n_heads, n_queries, n_keys, n_splits, keys_per_split, group,
        left, right, starts_q, starts_k, blocks, CONSUMERS, BLOCK_K, IS_CAUSAL, SPLIT, Q_PER_KV,
        BOUNDED, LOWER_RIGHT, PACKED,
    ):  # fmt: skip
        self.n_work = n_work
        self.n_programs = n_programs
        self.n_heads = n_heads
        self.n_queries = n_queries
        self.n_keys = n_keys
        self.n_splits = n_splits
        self.keys_per_split = keys_per_split
        self.group = group
        self.left = left
        self.right = right
        self.starts_q = starts_q
        self.starts_k = starts_k
        self.blocks = blocks
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.BLOCK_K = gl.constexpr(BLOCK_K)
        self.IS_CAUSAL = gl.constexpr(IS_CAUSAL)
        self.SPLIT = gl.constexpr(SPLIT)
        self.Q_PER_KV = gl.constexpr(Q_PER_KV)
        self.BOUNDED = gl.constexpr(BOUNDED)
        self.LOWER_RIGHT = gl.constexpr(LOWER_RIGHT)
        self.PACKED = gl.constexpr(PACKED)

    @gluon.jit
    def locate(self, work):
        """Return the `WorkItem` with the index `work`, in the order of `tile_ops.schedule`."""
        BLOCK_Q: gl.constexpr = self.CONSUMERS * ROWS
        n_splits = self.n_splits
        if not self.SPLIT:
            n_splits = 1
        n_queries, n_keys = self.n_queries, self.n_keys
        query_start, key_start = gl.to_tensor(0), gl.to_tensor(0)
        if self.PACKED:
            sequence, block, head = packed_block(self.blocks, work, self.n_heads, self.group)
            split = gl.to_tensor(0)
            query_start, n_queries = sequence_rows(self.starts_q, sequence, 1, n_queries, True)
            key_start, n_keys = sequence_rows(self.starts_k, sequence, 1, n_keys, True)
        else:
            block, head, split = schedule(
                work, gl.cdiv(n_queries, BLOCK_Q), self.n_programs, n_splits, self.keys_per_split,
                self.group, BLOCK_Q, self.IS_CAUSAL, False,
            )  # fmt: skip
        first_query = block * BLOCK_Q
        first_key = gl.to_tensor(0)
        last_key = n_keys
        if self.SPLIT:
            first_key = split * self.keys_per_split
            last_key = gl.minimum(last_key, first_key + self.keys_per_split)
        lower, upper = 0, 0
        if self.BOUNDED:
            shift = n_keys - n_queries if self.LOWER_RIGHT else 0
            lower = shift - self.left
            upper = shift + (0 if self.IS_CAUSAL else self.right)
            first_key, _, _, last_key = seen_keys(
                first_query, first_key, last_key, n_keys, lower, upper, BLOCK_Q, self.BLOCK_K,
                True, True,
            )  # fmt: skip
        elif self.IS_CAUSAL:
            last_key = gl.minimum(last_key, gl.minimum(first_query + BLOCK_Q, n_queries))
        n_tiles = gl.maximum(1, gl.cdiv(last_key - first_key, self.BLOCK_K))
        return WorkItem(
            head, gl.to_tensor(split), first_query, first_key, last_key, n_tiles, query_start,
            n_queries, key_start, n_keys, gl.to_tensor(lower), gl.to_tensor(upper),
        )  # fmt: skip


@aggregate
class WorkItem:
    """Queries and keys of a work item.

    Rows of queries and keys are counted from the start of their sequence. Query i sees the keys
    from i + lower to i + upper. These bounds are set only if the problem is BOUNDED.
    """

    head: gl.tensor  # index of the head of q, which counts the heads of all batch elements
    split: gl.tensor  # index of the range of keys
    first_query: gl.tensor  # first query of the block
    first_key: gl.tensor  # first key of the first tile
    last_key: gl.tensor  # key after the last one that a query of the block sees; can be < first_key
    n_tiles: gl.tensor  # number of tiles of BLOCK_K keys, at least 1
    query_start: gl.tensor  # row of the tensor q that has the first query of the sequence
    n_queries: gl.tensor  # number of queries of the sequence
    key_start: gl.tensor  # row of the tensor k that has the first key of the sequence
    n_keys: gl.tensor  # number of keys of the sequence
    lower: gl.tensor
    upper: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self, head, split, first_query, first_key, last_key, n_tiles, query_start, n_queries,
        key_start, n_keys, lower, upper,
    ):  # fmt: skip
        self.head = head
        self.split = split
        self.first_query = first_query
        self.first_key = first_key
        self.last_key = last_key
        self.n_tiles = n_tiles
        self.query_start = query_start
        self.n_queries = n_queries
        self.key_start = key_start
        self.n_keys = n_keys
        self.lower = lower
        self.upper = upper

    @gluon.jit
    def tiles_of(self, first_query, problem):
        """Return the tiles of this work item that the 64 queries from first_query on see.

        Tiles are numbered from 0, the one that starts with key first_key.

        Returns:
            begin, end: tiles begin to end - 1 are processed, at least one. Queries past the last
                one need no tile, and get one.
            full_start, full_end: all queries see all keys from full_start to full_end - 1. Other
                tiles need a mask. Set only if the problem is BOUNDED.
        """
        BLOCK_K: gl.constexpr = problem.BLOCK_K
        begin, end = gl.to_tensor(0), self.n_tiles
        full_start, full_end = gl.to_tensor(0), gl.to_tensor(0)
        if problem.BOUNDED:
            first, full_start, full_end, last = seen_keys(
                first_query, self.first_key, self.last_key, self.n_keys, self.lower, self.upper,
                ROWS, BLOCK_K, True, True,
            )  # fmt: skip
            end = gl.minimum(gl.maximum(1, gl.cdiv(last - self.first_key, BLOCK_K)), self.n_tiles)
            end = gl.where(first_query < self.n_queries, end, 1)
            begin = gl.minimum((first - self.first_key) // BLOCK_K, end - 1)
        else:
            if problem.IS_CAUSAL:
                last = gl.minimum(self.last_key, first_query + ROWS)
                end = gl.maximum(1, gl.cdiv(last - self.first_key, BLOCK_K))
            end = gl.where(first_query < self.n_queries, end, 1)
        return begin, end, full_start, full_end


@gluon.jit
def next_work(next_work, full, empty, turn):
    """Return the index of the next work item, as published by the producer warp.

    The function waits until the index is published. An index of n_work or more means that no work
    item is left. `next_work`, a ring of two indices in shared memory, has the mbarriers full and
    empty (see the module `forward.kernel`). `turn` is the number of work items that this program
    has processed.
    """
    slot = turn % 2
    mbarrier.wait(full.index(slot), turn // 2 & 1)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    work = gl.max(next_work.index(slot).load(one), 0)
    mbarrier.arrive(empty.index(slot), count=1)
    return work


@gluon.jit
def publish(work, next_work, full, empty, turn):
    """Publish the index of the next work item. The arguments are those of `next_work`."""
    slot = turn % 2
    mbarrier.wait(empty.index(slot), (turn // 2 & 1) ^ 1)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    next_work.index(slot).store(gl.full([1], 0, gl.int32, one) + work)
    mbarrier.arrive(full.index(slot), count=1)
