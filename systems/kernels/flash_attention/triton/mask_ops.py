"""Device functions of the attention kernels for masks, packed sequences and capped scores.

Query i of a sequence sees the keys from i + lower to i + upper. The constexprs HAS_LEFT and
HAS_RIGHT state which of the two bounds exist. A causal mask has only the bound upper.

With the constexpr PACKED, the rows of a tensor belong to several sequences, one after another. The
first dimension (batch) then counts sequences, and its stride is 0. Without PACKED, each sequence
has all rows of its batch element.
"""

# Kernel arguments have Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from systems.kernels.flash_attention.triton.tile_ops import head_base

LOG2E = tl.constexpr(1.4426950408889634)
# Below this magnitude, tanh is computed from its series. The formula with exp2 would have an
# absolute error near 2^-22, which is a large relative error of a small number.
SERIES_BELOW = tl.constexpr(0.25)


@triton.jit
def sequence_rows(starts, head, n_heads, total, PACKED: tl.constexpr):
    """Return the first row and the number of rows of the sequence to which a head belongs.

    Boundaries outside the tensor are moved to its ends, so that no kernel reads or writes outside.
    `starts` are the boundaries, int32 (n_sequences + 1,), read only with PACKED. `head` is the
    index among the heads of all sequences, n_heads of each.
    """
    if PACKED:
        starts += head // n_heads
        first = tl.minimum(tl.maximum(tl.load(starts), 0), total)
        n_rows = tl.minimum(tl.maximum(tl.load(starts + 1), first), total) - first
    else:
        first = tl.full((), 0, tl.int32)
        n_rows = total
    return first, n_rows


@triton.jit
def sequence_base(pointer, head, n_heads, first, batch_stride, head_stride, row_stride):
    """Return the address of the first row of a sequence of a head.

    The tensor at `pointer` is (batch, heads, rows, head_dim). `first` is from `sequence_rows`, and
    `tile_ops.head_base` describes the others.
    """
    base = head_base(pointer, head, n_heads, batch_stride, head_stride)
    return base + first.to(tl.int64) * row_stride


@triton.jit
def rows_before(head, n_heads, total, first, PACKED: tl.constexpr):
    """Return the number of rows before a sequence in a contiguous tensor (..., heads, total, n).

    With PACKED, the tensor has the heads of one batch element; else those of all batch elements.
    `first` is from `sequence_rows`.
    """
    if PACKED:
        rows = (head % n_heads).to(tl.int64) * total + first
    else:
        rows = head.to(tl.int64) * total
    return rows


@triton.jit
def n_matrices(n_programs, n_heads, PACKED: tl.constexpr):
    """Return the number of matrices (total, n) in a contiguous tensor (..., heads, total, n)."""
    if PACKED:
        count = n_heads
    else:
        count = n_programs
    return count


@triton.jit
def mask_bounds(left, right, n_queries, n_keys, IS_CAUSAL: tl.constexpr, LOWER_RIGHT: tl.constexpr):
    """Return (lower, upper): query i sees the keys from i + lower to i + upper.

    `left` and `right` are the numbers of keys before and after its position that a query sees. With
    IS_CAUSAL, right is 0; as a constant, it saves registers. With LOWER_RIGHT, the last query has
    the position of the last key, else the first that of the first.
    """
    lower, upper = -left, right
    if IS_CAUSAL:
        upper = tl.full((), 0, tl.int32)
    if LOWER_RIGHT:
        lower += n_keys - n_queries
        upper += n_keys - n_queries
    return lower, upper


@triton.jit
def seen_keys(
    first_query, first_key, last_key, n_keys, lower, upper,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """Return the tiles of a range of keys that a block of queries sees.

    The range starts at first_key, a multiple of BLOCK_K. It ends before last_key, another one or
    n_keys.

    Returns:
        first, full_start, full_end, last: keys before `first` and from `last` on are not seen. All
        queries of the block see all keys from full_start to full_end, so these tiles need no mask.
        All values except `last` are multiples of BLOCK_K.
    """
    full_keys = n_keys
    if HAS_RIGHT:
        last_key = tl.minimum(last_key, first_query + BLOCK_Q + upper)
        full_keys = tl.minimum(full_keys, first_query + upper + 1)
    full_start = first_key
    if HAS_LEFT:
        seen = tl.maximum(first_query + lower, 0)
        full_start = tl.cdiv(tl.maximum(first_query + BLOCK_Q - 1 + lower, 0), BLOCK_K) * BLOCK_K
        first_key = tl.maximum(first_key, seen // BLOCK_K * BLOCK_K)
        last_key = tl.maximum(last_key, first_key)
        full_start = tl.minimum(full_start, tl.cdiv(last_key, BLOCK_K) * BLOCK_K)
        full_start = tl.maximum(full_start, first_key)
    full_end = tl.minimum(last_key, full_keys // BLOCK_K * BLOCK_K)
    full_end = tl.maximum(full_end, full_start)
    return first_key, full_start, full_end, last_key


@triton.jit
def seen_by_queries(
    first_key, first_query, last_query, lower, upper,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """Return the tiles of a range of queries that see a block of keys.

    The range starts at first_query, a multiple of BLOCK_Q. It ends before last_query, another one
    or the number of queries.

    Returns:
        first, full_start, full_end, last: queries before `first` and from `last` on see no key of
        the block. All queries from full_start to full_end see all keys of the block, so these
        tiles need no mask. All values except `last` are multiples of BLOCK_Q.
    """
    full_start = first_query
    full_end = last_query
    if HAS_LEFT:
        last_query = tl.minimum(last_query, first_key + BLOCK_K - lower)
        full_end = tl.maximum(tl.minimum(full_end, first_key - lower + 1), 0)
    if HAS_RIGHT:
        seeing = tl.maximum(first_key - upper, 0)
        full_start = tl.cdiv(tl.maximum(first_key + BLOCK_K - 1 - upper, 0), BLOCK_Q) * BLOCK_Q
        first_query = tl.maximum(first_query, seeing // BLOCK_Q * BLOCK_Q)
    if HAS_LEFT or HAS_RIGHT:
        last_query = tl.maximum(last_query, first_query)
        full_start = tl.minimum(full_start, tl.cdiv(last_query, BLOCK_Q) * BLOCK_Q)
        full_start = tl.maximum(full_start, first_query)
    full_end = tl.maximum(full_end // BLOCK_Q * BLOCK_Q, full_start)
    return first_query, full_start, full_end, last_query


@triton.jit
def masked_tile(position, full_start, full_end, HAS_BEFORE: tl.constexpr):
    """Return the first row of a tile that needs a mask.

    These tiles are those before full_start and those from full_end on, by `seen_keys` or
    `seen_by_queries`. A loop over them goes from first + full_end - full_start to last, in steps of
    a tile. Its positions below full_end stand for the tiles before full_start.
    """
    start = position
    if HAS_BEFORE:
        start = tl.where(position < full_end, position - (full_end - full_start), position)
    return start


@triton.jit
def within_bounds(
    visible, queries, keys, lower, upper, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr
):
    """Return the elements of `visible`, a bool tile or True, whose query sees their key.

    The indices `queries` and `keys` broadcast to the tile.
    """
    if HAS_RIGHT:
        visible = visible & (keys <= queries + upper)
    if HAS_LEFT:
        visible = visible & (keys >= queries + lower)
    return visible


@triton.jit
def tanh(x, IS_PRECISE: tl.constexpr):
    """Return tanh(x) = 1 - 2 / (exp(2 x) + 1) of float32 numbers.

    With IS_PRECISE, the relative error is small also for x near 0, otherwise the absolute error.
    """
    result = 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)
    if IS_PRECISE:
        # The next term of the series is below 2^-26 of the sum.
        y = x * x
        series = 1.0 + y * (-1 / 3 + y * (2 / 15 + y * (-17 / 315 + y * (62 / 2835))))
        result = tl.where(tl.abs(x) < SERIES_BELOW, x * series, result)
    return result
