"""Device functions of the attention kernels: load, multiply and store tiles, and order work items.

Tensors are (batch, heads, rows, head_dim), with arbitrary strides of the first three dimensions.
The elements of a row are contiguous. The address of a tile is computed with 64-bit integers.
Offsets within a tile have only 32 bits. This is enough, because `layout` keeps the stride of the
rows below `tile_table.MAX_ROW_STRIDE`.

With FP16X3, a float32 tensor is given as two float16 tensors of the same shape, its high and low
half. The sum of the halves is the tensor divided by a power of two, the `unit`. Each head has a
separate unit. Tensor cores multiply the halves exactly, and the two halves of a number together
have a sign and 22 bits. A matmul of two such tensors consists of four matmuls of halves. The matmul
of the two low halves is negligible. The other three together are as accurate as a float32 matmul
(Ootomo and Yokota 2022, "Recovering single precision accuracy from Tensor Cores while surpassing
the FP32 theoretical peak performance").

A matmul operand is a tuple: (high, low) with FP16X3, else (tile,).
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
SMALLEST = tl.constexpr(2.0**-100)  # lower bound of a peak
SMALLEST_BITS = tl.constexpr((127 - 100) << 23)  # SMALLEST in float32, as an integer
INFINITE_BITS = tl.constexpr(0x7F800000)  # infinity in float32, as an integer


@triton.jit
def head_base(pointer, head, n_heads, batch_stride, head_stride):
    """Return the address of the first row of a head.

    `head` is the index of the head, which counts the heads of all batch elements.
    """
    batch = (head // n_heads).to(tl.int64)
    return pointer + batch * batch_stride + (head % n_heads).to(tl.int64) * head_stride


@triton.jit
def load_tile(
    base, first, n_rows, row_stride,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Load a tile (ROWS, COLUMNS) that starts at row `first`.

    Columns past HEAD_DIM are zero. If RAGGED, the tile may extend past n_rows, and rows past n_rows
    are zero. Otherwise, rows are loaded without a mask.
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
    """Load a tile as a matmul operand.

    With FP16X3, the low half is stored half_stride elements after the high half.
    """
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
    """Convert a float32 tile to a matmul operand. Without FP16X3, the tile is rounded to DTYPE.

    With FP16X3, the tile must be scaled so that its largest magnitudes are around TOP_POWER,
    because float16 has fewer bits below 2^-14 (subnormal numbers).
    """
    if not FP16X3:
        operand = (x.to(DTYPE),)
    else:
        high = x.to(tl.float16)
        operand = (high, (x - high.to(tl.float32)).to(tl.float16))
    return operand


@triton.jit
def power_of_two(x):
    """Return the largest power of two that is not above x, or 0 if x < 2^-126.

    x must be positive and finite.
    """
    bits = x.to(tl.int32, bitcast=True) & 0x7F800000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def peak_of(peaks, tensor, head, n_programs):
    """Return the address of the peak of a head, which is the largest magnitude of the head.

    Args:
        peaks: int32 (number of tensors, n_programs rounded up to a multiple of 4): the bits of
            float32 numbers.
        tensor: index of the tensor.
        head: index of the head, which counts the heads of all batch elements.
        n_programs: batch * heads.
    """
    return peaks + tensor * ((n_programs + 3) // 4 * 4) + head


@triton.jit
def unit(peaks, tensor, head, n_programs):
    """Return the power of two by which a head is divided, or NaN if its peak is not finite.

    The arguments are those of `peak_of`.
    """
    bits = tl.load(peak_of(peaks, tensor, head, n_programs))
    peak = tl.maximum(bits, SMALLEST_BITS).to(tl.float32, bitcast=True)
    # A head that contains a value that is not finite cannot be scaled. The whole head becomes NaN.
    return tl.where(bits < INFINITE_BITS, power_of_two(peak) * TOP_INVERSE, float("nan"))


@triton.jit
def scaled(x, peak):
    """Scale each row of x by a power of two, so that it can be converted by `as_operand`.

    The power of two depends on the peak of the row: its largest magnitude in this and earlier
    calls.

    Args:
        peak: peaks of the rows, as returned by the previous call; `SMALLEST` in the first call.

    Returns:
        the scaled x, the new peaks, and the factors that convert an earlier sum to the new scale.
    """
    new_peak = tl.maximum(peak, tl.max(tl.abs(x), 1))
    row_unit = power_of_two(new_peak) * TOP_INVERSE
    correction = power_of_two(peak) / power_of_two(new_peak)
    return x * (1.0 / row_unit)[:, None], new_peak, correction


@triton.jit
def unscaled(total, peak):
    """Undo the scaling of `scaled` in a sum of matmuls with scaled rows."""
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
    """Return the matmul a b in float32.

    PRECISION is the input precision for float32 tiles. With FP16X3, the matmuls low * high and high
    * low are added first, and then the larger matmul high * high. The matmul low * low is left out.
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

    Tensor cores round toward zero when they accumulate. In a long sum, these errors add up. So with
    FP16X3, the sum over tiles is computed outside the tensor cores, where additions round to
    nearest.
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
    """Store a tile (ROWS, COLUMNS), converted to the dtype of `base`, from row `first` on.

    Rows past n_rows and columns past HEAD_DIM are not stored.
    """
    row, column = tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    tile = base + tl.cast(first, tl.int64) * row_stride
    there = row[:, None] < n_rows - first
    if HEAD_DIM < COLUMNS:
        there = there & (column[None, :] < HEAD_DIM)
    pointers = tile + (row[:, None] * row_stride + column[None, :])
    tl.store(pointers, values.to(base.dtype.element_ty), mask=there)


@triton.jit
def load_rows(base, first, n_rows, ROWS: tl.constexpr, RAGGED: tl.constexpr):
    """Load ROWS contiguous numbers, one per row, from row `first` on.

    If RAGGED, the numbers of rows past n_rows are zero. Otherwise, they are loaded without a mask.
    """
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
    """Return the (block, head, split) of a work item, in an order in which long items start first.

    Heads are scheduled in groups that share the L2 cache. In a causal pass, the work items of a
    head have different lengths. The longest items of a group come first, and short items fill the
    gaps at the end (longest processing time first). The order of the blocks is:

    - Without splits, from the last to the first block of queries, or from the first to the last
      block of keys.
    - With splits, the same order, but rotated for each split. The blocks for which the split has no
      work come first; they take almost no time. After them, the items of different splits at the
      same position have about the same length, and the length decreases.

    Consecutive items alternate between the splits, also without a causal mask.

    Args:
        item: index of the work item, below n_blocks * n_programs * n_splits.
        n_blocks: number of blocks per head.
        n_programs: batch * heads.
        n_splits: number of ranges into which the inner loop is split.
        rows_per_split: number of rows in each range except the last.
        group: number of heads per group.
        BLOCK: number of rows per block.
        BY_KEYS: True if blocks consist of keys and splits of queries; False if blocks consist of
            queries and splits of keys.
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
