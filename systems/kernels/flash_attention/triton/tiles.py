"""Tiles of rows by columns, and the order in which programs take them: parts of all passes.

A tensor of any leading dimensions comes as (batch, heads, rows, head_dim) with the strides of its
first three; elements of a row lie side by side. Offsets of a tile are 64 bits wide, those within
one 32: the launcher sees to it that a row's stride is below `configurations.MAX_ROW_STRIDE`.

float32 comes as two float16 tensors of the same shape, PARTS = 2, that add up to it but for a
power of two of each head, its unit: tensor cores multiply 16-bit numbers exactly, and two float16
hold 22 bits and a sign between them, so three of the four products of the parts err by no more than
float32 does (Ootomo and Yokota 2022, "Recovering single precision accuracy from Tensor Cores while
surpassing the FP32 theoretical peak performance"). A tile is a tuple of its parts, of one where
PARTS = 1.
"""

# Arguments of a kernel are Triton's, which has no types, and its tuples have any length.
# mypy: disable-error-code="assignment"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

TOP_POWER = tl.constexpr(2.0**14)  # what is cut is at most twice as large: float16 ends at 65504
TOP_INVERSE = tl.constexpr(2.0**-14)
SMALLEST = tl.constexpr(2.0**-100)  # magnitudes below it are taken for it
SMALLEST_BITS = tl.constexpr((127 - 100) << 23)
INFINITE_BITS = tl.constexpr(0x7F800000)


@triton.jit
def head_base(pointer, head, n_heads, batch_stride, head_stride):
    """Where the rows of head `head` of batch * n_heads begin."""
    batch = (head // n_heads).to(tl.int64)
    return pointer + batch * batch_stride + (head % n_heads).to(tl.int64) * head_stride


@triton.jit
def load_tile(
    base, first, n_rows, row_stride,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """(ROWS, COLUMNS) from row `first` on; zero past HEAD_DIM and, where RAGGED, past n_rows.

    A tile that is not RAGGED lies within the rows; it has no mask and no comparisons.
    """
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    tile = base + tl.cast(first, tl.int64) * row_stride
    pointers = tile + (row[:, None] * row_stride + column[None, :])
    if RAGGED and HEAD_DIM < COLUMNS:
        there = (row[:, None] < n_rows - first) & (column[None, :] < HEAD_DIM)
        values = tl.load(pointers, mask=there, other=0.0)
    elif RAGGED:
        values = tl.load(pointers, mask=row[:, None] < n_rows - first, other=0.0)
    elif HEAD_DIM < COLUMNS:
        values = tl.load(pointers, mask=column[None, :] < HEAD_DIM, other=0.0)
    else:
        values = tl.load(pointers)
    return values


@triton.jit
def load_parts(
    base, part_stride, first, n_rows, row_stride,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RAGGED: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """`load_tile` of every part; part_stride elements from one to the next."""
    high = load_tile(base, first, n_rows, row_stride, HEAD_DIM, ROWS, COLUMNS, RAGGED)
    if PARTS == 1:
        parts = (high,)
    else:
        base += part_stride
        low = load_tile(base, first, n_rows, row_stride, HEAD_DIM, ROWS, COLUMNS, RAGGED)
        parts = (high, low)
    return parts


@triton.jit
def in_parts(x, DTYPE: tl.constexpr, PARTS: tl.constexpr):
    """A float32 tile as its parts in float16, or rounded to DTYPE where PARTS = 1.

    Below 2^-14 a part has fewer bits: what is cut comes as large as TOP_POWER has it.
    """
    if PARTS == 1:
        parts = (x.to(DTYPE),)
    else:
        high = x.to(tl.float16)
        parts = (high, (x - high.to(tl.float32)).to(tl.float16))
    return parts


@triton.jit
def power_of_two(x):
    """The largest one that is no larger than x, which is positive and finite; 0 below 2^-126."""
    bits = x.to(tl.int32, bitcast=True) & 0x7F800000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def peak_of(peaks, tensor, head, n_programs):
    """Where the peak of a head is.

    Args:
        peaks: int32 (tensors, n_programs padded to a multiple of 4), bits of the largest magnitude
            in float32. tensor: which of them.
    """
    return peaks + tensor * ((n_programs + 3) // 4 * 4) + head


@triton.jit
def unit(peaks, tensor, head, n_programs):
    """What a head of a tensor in two parts is to be multiplied by: a power of two. Arguments are
    those of `peak_of`."""
    bits = tl.load(peak_of(peaks, tensor, head, n_programs))
    peak = tl.maximum(bits, SMALLEST_BITS).to(tl.float32, bitcast=True)
    # A number that is not finite leaves no scale for the others: all of its head are NaN.
    return tl.where(bits < INFINITE_BITS, power_of_two(peak) * TOP_INVERSE, float("nan"))


@triton.jit
def scaled(x, peak):
    """Rows of x as `in_parts` takes them, by powers of two that follow from their largest so far.

    Args:
        peak: of each row, what the last call returned; `SMALLEST` at first.

    Returns:
        x times its rows' powers, the new peaks, and what a sum of earlier rows is to be multiplied
        by to have the same powers as these.
    """
    new_peak = tl.maximum(peak, tl.max(tl.abs(x), 1))
    row_unit = power_of_two(new_peak) * TOP_INVERSE
    correction = power_of_two(peak) / power_of_two(new_peak)
    return x * (1.0 / row_unit)[:, None], new_peak, correction


@triton.jit
def of_scaled(total, peak):
    """A sum of what `scaled` gave, without the powers of two."""
    return total * (power_of_two(peak) * TOP_INVERSE)[:, None]


@triton.jit
def transposed(x, PARTS: tl.constexpr):
    if PARTS == 1:
        parts = (tl.trans(x[0]),)
    else:
        parts = (tl.trans(x[0]), tl.trans(x[1]))
    return parts


@triton.jit
def product(a, b, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """a b in float32, the smallest products first; PRECISION is that of float32 tiles."""
    if PARTS == 2:
        total = tl.dot(a[1], b[0])
        total = tl.dot(a[0], b[1], total)
        total = tl.dot(a[0], b[0], total)
    else:
        total = tl.dot(a[0], b[0], input_precision=PRECISION)
    return total


@triton.jit
def add_product(total, a, b, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """total + a b in float32.

    A tensor core cuts off what does not fit each time that it adds, always towards zero: in a long
    sum such errors do not cancel. So products of parts are added up outside of it, rounded.
    """
    if PARTS == 2:
        total += product(a, b, PARTS, PRECISION)
    else:
        total = tl.dot(a[0], b[0], total, input_precision=PRECISION)
    return total


@triton.jit
def store_tile(
    base, first, n_rows, row_stride, values,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write what of (ROWS, COLUMNS) lies within n_rows and HEAD_DIM, in the dtype of `base`."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    tile = base + tl.cast(first, tl.int64) * row_stride
    there = row[:, None] < n_rows - first
    if HEAD_DIM < COLUMNS:
        there = there & (column[None, :] < HEAD_DIM)
    pointers = tile + (row[:, None] * row_stride + column[None, :])
    tl.store(pointers, values.to(base.dtype.element_ty), mask=there)


@triton.jit
def load_rows(base, first, n_rows, ROWS: tl.constexpr, RAGGED: tl.constexpr):
    """(ROWS,) of one number a row, side by side; zero past n_rows where RAGGED."""
    row = tl.arange(0, ROWS)
    pointers = base + first + row
    if RAGGED:
        values = tl.load(pointers, mask=row < n_rows - first, other=0.0)
    else:
        values = tl.load(pointers)
    return values


@triton.jit
def schedule(
    item, n_blocks, n_programs, n_splits, rows_a_split, group,
    BLOCK: tl.constexpr, IS_CAUSAL: tl.constexpr, BY_KEYS: tl.constexpr,
):  # fmt: skip
    """(block, head, split) of one of n_blocks * n_programs * n_splits items of work.

    Heads come in groups that share the L2 cache. Within a group the longest items of a causal pass
    come first and the short ones fill the gaps that they leave (longest processing time first).
    Without splits these are the last blocks of queries, or the first of keys. A block's distance
    from where its split's rows are all seen decides how long it is: so blocks are counted from
    there, and those of which a split has nothing come around to the front. Splits take turns, also
    where nothing is causal.

    Args:
        n_programs: batch * heads.
        n_splits: ranges that the other axis is cut into, of rows_a_split rows each.
        group: heads of a group.
        BLOCK: rows of a block.
        BY_KEYS: blocks are of keys and splits of queries, not the other way round.
    """
    a_head = n_blocks * n_splits
    first = item // (group * a_head) * group
    within = item % (group * a_head)
    size = min(group, n_programs - first)  # the last group may be smaller
    head = first + within % size
    split = within // size % n_splits
    block = within // size // n_splits
    if IS_CAUSAL:
        if BY_KEYS:
            n_seen = ((split + 1) * rows_a_split + BLOCK - 1) // BLOCK
            block += min(n_blocks, n_seen)
        else:
            block = n_blocks - 1 - block + split * rows_a_split // BLOCK
        block = block % n_blocks
    return block, head, split
