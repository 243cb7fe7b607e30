"""Device functions shared by all kernels: load, multiply and store tiles, and order work items.

Tensors are addressed as (batch, heads, rows, head_dim) with the strides of the first three
dimensions; elements of a row are contiguous. The offset of a tile is a 64-bit integer, and offsets
within a tile are 32-bit: `layout` keeps the stride of a row below `tile_table.MAX_ROW_STRIDE`.

With FP16X3, a float32 tensor is represented by two float16 halves of the same shape. Their sum is
the tensor divided by a power of two, the `unit`, which each head has separately. Tensor cores
multiply 16-bit numbers exactly, and two float16 numbers together hold a sign and 22 bits. Three of
the four matmuls of the halves are therefore as accurate as a float32 matmul (Ootomo and Yokota
2022, "Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical
peak performance"). A matmul operand is a tuple: (high, low) with FP16X3, else (tile,).
"""

# Kernel arguments have Triton's own types, which mypy does not know; its tuples have any length.
# mypy: disable-error-code="assignment"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

# Values are scaled to magnitudes below 2 * TOP_POWER = 2^15; the largest float16 is 65504.
TOP_POWER = tl.constexpr(2.0**14)
TOP_INVERSE = tl.constexpr(2.0**-14)
SMALLEST = tl.constexpr(2.0**-100)  # smallest peak; smaller peaks are replaced by it
SMALLEST_BITS = tl.constexpr((127 - 100) << 23)  # SMALLEST in float32, as an integer
INFINITE_BITS = tl.constexpr(0x7F800000)  # infinity in float32, as an integer


@triton.jit
def head_base(pointer, head, n_heads, batch_stride, head_stride):
    """Return the address of the first row of a head, whose index counts all batch elements."""
    batch = (head // n_heads).to(tl.int64)
    return pointer + batch * batch_stride + (head % n_heads).to(tl.int64) * head_stride


@triton.jit
def load_tile(
    base, first, n_rows, row_stride,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Load a tile (ROWS, COLUMNS) that starts at row `first`.

    Columns past HEAD_DIM are zero, and if RAGGED, rows past n_rows are zero. A tile that is not
    RAGGED is loaded without a mask for its rows, so it must end at or before n_rows.
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
    """Load a tile as a matmul operand; the two halves are half_stride elements apart."""
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
    """Convert a float32 tile to a matmul operand. Without FP16X3 it is rounded to DTYPE.

    With FP16X3 the tile must be scaled so that its largest magnitudes are around TOP_POWER, because
    float16 has fewer bits below 2^-14 (subnormal numbers).
    """
    if not FP16X3:
        operand = (x.to(DTYPE),)
    else:
        high = x.to(tl.float16)
        operand = (high, (x - high.to(tl.float32)).to(tl.float16))
    return operand


@triton.jit
def power_of_two(x):
    """Return the largest power of two up to x, or 0 if x < 2^-126; x is positive and finite."""
    bits = x.to(tl.int32, bitcast=True) & 0x7F800000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def peak_of(peaks, tensor, head, n_programs):
    """Return the address of the peak of a head: its largest magnitude.

    Args:
        peaks: int32 (tensors, n_programs padded to a multiple of 4), the bits of float32 numbers.
        tensor: index of the tensor.
        head: index of the head, counting all batch elements.
        n_programs: batch * heads.
    """
    return peaks + tensor * ((n_programs + 3) // 4 * 4) + head


@triton.jit
def unit(peaks, tensor, head, n_programs):
    """Return the power of two by which a head was divided. Arguments as for `peak_of`."""
    bits = tl.load(peak_of(peaks, tensor, head, n_programs))
    peak = tl.maximum(bits, SMALLEST_BITS).to(tl.float32, bitcast=True)
    # A head with a value that is not finite cannot be scaled: the whole head becomes NaN.
    return tl.where(bits < INFINITE_BITS, power_of_two(peak) * TOP_INVERSE, float("nan"))


@triton.jit
def scaled(x, peak):
    """Scale each row of x for `as_operand` by a power of two that follows from its running peak.

    Args:
        peak: largest magnitude of each row so far, as returned by the previous call; `SMALLEST` in
            the first call.

    Returns:
        the scaled x, the new peaks, and the factors that bring an earlier sum to the new scale.
    """
    new_peak = tl.maximum(peak, tl.max(tl.abs(x), 1))
    row_unit = power_of_two(new_peak) * TOP_INVERSE
    correction = power_of_two(peak) / power_of_two(new_peak)
    return x * (1.0 / row_unit)[:, None], new_peak, correction


@triton.jit
def unscaled(total, peak):
    """Undo the scaling of `scaled` in a sum of scaled rows."""
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
    """Return the matmul a b in float32; PRECISION applies to float32 tiles.

    With FP16X3 the two matmuls of a low and a high half are added before that of the high halves.
    The matmul of the low halves is left out.
    """
    if FP16X3:
        total = tl.dot(a[1], b[0])
        total = tl.dot(a[0], b[1], total)
        total = tl.dot(a[0], b[0], total)
    else:
        total = tl.dot(a[0], b[0], input_precision=PRECISION)
    return total


@triton.jit
def add_product(total, a, b, FP16X3: tl.constexpr, PRECISION: tl.constexpr):
    """Return total + a b in float32, where a b is a matmul.

    Tensor cores truncate towards zero when they accumulate, and in a long sum these errors do not
    cancel. So with FP16X3 the sum over tiles is computed outside the tensor cores, where additions
    round to nearest.
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
    """Store a tile (ROWS, COLUMNS) in the dtype of `base`, except past n_rows and HEAD_DIM."""
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    tile = base + tl.cast(first, tl.int64) * row_stride
    there = row[:, None] < n_rows - first
    if HEAD_DIM < COLUMNS:
        there = there & (column[None, :] < HEAD_DIM)
    pointers = tile + (row[:, None] * row_stride + column[None, :])
    tl.store(pointers, values.to(base.dtype.element_ty), mask=there)


@triton.jit
def load_rows(base, first, n_rows, ROWS: tl.constexpr, RAGGED: tl.constexpr):
    """Load one number per row, (ROWS,), contiguous in memory; zero past n_rows if RAGGED."""
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
    """Map the index of a work item to its (block, head, split), so that long items start first.

    Heads are scheduled in groups that share the L2 cache. In a causal pass, the longest items of a
    group come first, so that short ones fill the gaps at the end (longest processing time first).
    Without splits the longest items are the last blocks of queries, or the first blocks of keys.
    With splits, the length of an item depends on the distance of its block from the block at which
    all rows of its split become visible. Blocks are counted from that block, and blocks for which
    the split has no work wrap around to the end. Consecutive items alternate between the splits,
    also without a causal mask.

    Args:
        item: index of the work item, below n_blocks * n_programs * n_splits.
        n_blocks: blocks of rows per head.
        n_programs: batch * heads.
        n_splits: number of ranges into which the other axis is split.
        rows_per_split: rows of a range.
        group: heads per group.
        BLOCK: rows per block.
        BY_KEYS: True if blocks are of keys and splits of queries; False for the opposite.
    """
    items_per_head = n_blocks * n_splits
    first = item // (group * items_per_head) * group
    within = item % (group * items_per_head)
    size = min(group, n_programs - first)  # the last group may have fewer heads
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
