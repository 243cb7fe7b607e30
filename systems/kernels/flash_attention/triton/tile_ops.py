"""Device functions that all passes share: loading, multiplying and storing tiles, and `schedule`.

A tensor of any leading dimensions comes as (batch, heads, rows, head_dim) with the strides of its
first three; elements of a row are contiguous. Offsets of a tile are 64-bit, those within a tile
32-bit: `layout` keeps the stride of a row below `tile_table.MAX_ROW_STRIDE`.

With FP16X3, a float32 tensor comes as two float16 halves of the same shape, whose sum is the tensor
divided by a power of two of each head, its unit. Tensor cores multiply 16-bit numbers exactly, and
two float16 hold 22 bits and a sign between them, so three of the four matmuls of the halves are as
accurate as float32 (Ootomo and Yokota 2022, "Recovering single precision accuracy from Tensor Cores
while surpassing the FP32 theoretical peak performance"). A matmul operand is a tuple: of both
halves with FP16X3, else of the tile alone.
"""

# Arguments of a kernel are Triton's, which has no types, and its tuples have any length.
# mypy: disable-error-code="assignment"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

TOP_POWER = tl.constexpr(2.0**14)  # scaled values are at most twice as large; float16 ends at 65504
TOP_INVERSE = tl.constexpr(2.0**-14)
SMALLEST = tl.constexpr(2.0**-100)  # smaller magnitudes count as this
SMALLEST_BITS = tl.constexpr((127 - 100) << 23)
INFINITE_BITS = tl.constexpr(0x7F800000)


@triton.jit
def head_base(pointer, head, n_heads, batch_stride, head_stride):
    """Return the address of the first row of head `head` of batch * n_heads."""
    batch = (head // n_heads).to(tl.int64)
    return pointer + batch * batch_stride + (head % n_heads).to(tl.int64) * head_stride


@triton.jit
def load_tile(
    base, first, n_rows, row_stride,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Load (ROWS, COLUMNS) from row `first` on; zero past HEAD_DIM and, if RAGGED, past n_rows.

    A tile that is not RAGGED must lie within the rows: it needs no mask.
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
def load_operand(
    base, half_stride, first, n_rows, row_stride,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RAGGED: tl.constexpr,
    FP16X3: tl.constexpr,
):  # fmt: skip
    """Load a tile as a matmul operand; half_stride elements separate the two halves."""
    high = load_tile(base, first, n_rows, row_stride, HEAD_DIM, ROWS, COLUMNS, RAGGED)
    if not FP16X3:
        operand = (high,)
    else:
        base += half_stride
        low = load_tile(base, first, n_rows, row_stride, HEAD_DIM, ROWS, COLUMNS, RAGGED)
        operand = (high, low)
    return operand


@triton.jit
def as_operand(x, DTYPE: tl.constexpr, FP16X3: tl.constexpr):
    """Convert a float32 tile to a matmul operand, rounded to DTYPE without FP16X3.

    Below 2^-14 a half has fewer bits, so the tile must be scaled to magnitudes around TOP_POWER.
    """
    if not FP16X3:
        operand = (x.to(DTYPE),)
    else:
        high = x.to(tl.float16)
        operand = (high, (x - high.to(tl.float32)).to(tl.float16))
    return operand


@triton.jit
def power_of_two(x):
    """Return the largest power of two up to x, which is positive and finite; 0 below 2^-126."""
    bits = x.to(tl.int32, bitcast=True) & 0x7F800000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def peak_of(peaks, tensor, head, n_programs):
    """Return the address of the peak of a head.

    Args:
        peaks: int32 (tensors, n_programs padded to a multiple of 4), bits of the largest magnitude
            in float32.
        tensor: index of the tensor.
    """
    return peaks + tensor * ((n_programs + 3) // 4 * 4) + head


@triton.jit
def unit(peaks, tensor, head, n_programs):
    """Return the power of two that scales a head's halves back. Arguments as for `peak_of`."""
    bits = tl.load(peak_of(peaks, tensor, head, n_programs))
    peak = tl.maximum(bits, SMALLEST_BITS).to(tl.float32, bitcast=True)
    # With a value that is not finite there is no scale: all of the head becomes NaN.
    return tl.where(bits < INFINITE_BITS, power_of_two(peak) * TOP_INVERSE, float("nan"))


@triton.jit
def scaled(x, peak):
    """Scale the rows of x for `as_operand` by powers of two, from their running maximum.

    Args:
        peak: of each row, as returned by the last call; `SMALLEST` at first.

    Returns:
        the scaled x, the new peaks, and the factor that brings an earlier sum to the same scale.
    """
    new_peak = tl.maximum(peak, tl.max(tl.abs(x), 1))
    row_unit = power_of_two(new_peak) * TOP_INVERSE
    correction = power_of_two(peak) / power_of_two(new_peak)
    return x * (1.0 / row_unit)[:, None], new_peak, correction


@triton.jit
def unscaled(total, peak):
    """Undo `scaled` in a sum."""
    return total * (power_of_two(peak) * TOP_INVERSE)[:, None]


@triton.jit
def transposed(x, FP16X3: tl.constexpr):
    if not FP16X3:
        operand = (tl.trans(x[0]),)
    else:
        operand = (tl.trans(x[0]), tl.trans(x[1]))
    return operand


@triton.jit
def product(a, b, FP16X3: tl.constexpr, PRECISION: tl.constexpr):
    """Return a b in float32, the smallest products first; PRECISION applies to float32 tiles."""
    if FP16X3:
        total = tl.dot(a[1], b[0])
        total = tl.dot(a[0], b[1], total)
        total = tl.dot(a[0], b[0], total)
    else:
        total = tl.dot(a[0], b[0], input_precision=PRECISION)
    return total


@triton.jit
def add_product(total, a, b, FP16X3: tl.constexpr, PRECISION: tl.constexpr):
    """Return total + a b in float32.

    Tensor cores truncate when they accumulate, always towards zero, and in a long sum such errors
    do not cancel. So with FP16X3 the sum over tiles is added outside of them, with rounding.
    """
    if FP16X3:
        total += product(a, b, FP16X3, PRECISION)
    else:
        total = tl.dot(a[0], b[0], total, input_precision=PRECISION)
    return total


@triton.jit
def store_tile(
    base, first, n_rows, row_stride, values,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store (ROWS, COLUMNS), without what is past n_rows or HEAD_DIM, in the dtype of `base`."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    tile = base + tl.cast(first, tl.int64) * row_stride
    there = row[:, None] < n_rows - first
    if HEAD_DIM < COLUMNS:
        there = there & (column[None, :] < HEAD_DIM)
    pointers = tile + (row[:, None] * row_stride + column[None, :])
    tl.store(pointers, values.to(base.dtype.element_ty), mask=there)


@triton.jit
def load_rows(base, first, n_rows, ROWS: tl.constexpr, RAGGED: tl.constexpr):
    """Load (ROWS,), one contiguous number per row; zero past n_rows if RAGGED."""
    row = tl.arange(0, ROWS)
    pointers = base + first + row
    if RAGGED:
        values = tl.load(pointers, mask=row < n_rows - first, other=0.0)
    else:
        values = tl.load(pointers)
    return values


@triton.jit
def schedule(
    item, n_blocks, n_programs, n_splits, rows_per_split, group,
    BLOCK: tl.constexpr, IS_CAUSAL: tl.constexpr, BY_KEYS: tl.constexpr,
):  # fmt: skip
    """Return (block, head, split) of one of n_blocks * n_programs * n_splits work items.

    Heads are scheduled in groups that share the L2 cache. Within a group the longest items of a
    causal pass come first and short ones fill the gaps (longest processing time first). Without
    splits these are the last blocks of queries, or the first of keys. With splits, the length of an
    item depends on the distance of its block from the block where all rows of its split are
    visible: blocks are counted from there, and those for which a split has no work wrap around.
    Splits alternate, in passes without a causal mask too.

    Args:
        n_programs: batch * heads.
        n_splits: number of ranges of the other axis, of rows_per_split rows each.
        group: heads in a group.
        BLOCK: rows in a block.
        BY_KEYS: blocks are of keys and splits of queries, not the other way round.
    """
    items_per_head = n_blocks * n_splits
    first = item // (group * items_per_head) * group
    within = item % (group * items_per_head)
    size = min(group, n_programs - first)  # the last group may be smaller
    head = first + within % size
    split = within // size % n_splits
    block = within // size // n_splits
    if IS_CAUSAL:
        if BY_KEYS:
            n_seen = ((split + 1) * rows_per_split + BLOCK - 1) // BLOCK
            block += min(n_blocks, n_seen)
        else:
            block = n_blocks - 1 - block + split * rows_per_split // BLOCK
        block = block % n_blocks
    return block, head, split
