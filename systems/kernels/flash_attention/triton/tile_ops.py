"""Device functions of the attention kernels: load, multiply and store tiles, and order work items.

Tensors are (batch, heads, rows, head_dim), with arbitrary strides of the first three dimensions.
The elements of a row are contiguous. The address of a tile is computed with 64-bit integers.
Offsets within a tile have only 32 bits. This is enough, because `layout` keeps the stride of the
rows below `tile_table.MAX_ROW_STRIDE`.

The constexpr FP16X3 selects the precision "fp16x3" for float32 inputs. With FP16X3, a float32
tensor is given as two float16 tensors of the same shape, its high half and its low half. The sum of
the halves is the tensor divided by a power of two, the `unit`. Each head has a separate unit.
Tensor cores multiply the halves exactly, and the two halves of a number together have a sign and 22
bits. A matmul of two such tensors consists of four matmuls of halves. The matmul of the two low
halves is negligible. The other three together are as accurate as a float32 matmul (Ootomo and
Yokota 2022, "Recovering single precision accuracy from Tensor Cores while surpassing the FP32
theoretical peak performance").

An operand of a matmul is a tuple of tiles: (high half, low half) with FP16X3, otherwise one tile.
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
    """Return the address of the first row of a head in a tensor (batch, heads, rows, head_dim).

    `head` is the index among the heads of all batch elements, n_heads of each. Strides are in
    elements.
    """
    batch = (head // n_heads).to(tl.int64)
    return pointer + batch * batch_stride + (head % n_heads).to(tl.int64) * head_stride


@triton.jit
def load_tile(
    base, first, n_rows, row_stride,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Load a tile (ROWS, COLUMNS) of one head.

    Columns from HEAD_DIM on are zero. `base` is the address of the first row of the head, and the
    stride is in elements. With RAGGED, the tile may extend past the last row of the head, and its
    rows past the end are zero. Otherwise, rows are loaded without a mask.
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
    """Load a tile (ROWS, COLUMNS) of one head as an operand of a matmul.

    With FP16X3, the low half is half_stride elements after the high half in memory. `load_tile`
    describes the other arguments.
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
    """Convert a float32 tile to an operand of a matmul: rounded to DTYPE, or two float16 halves.

    With FP16X3, the caller must scale x so that its largest magnitudes are around 2^14. Float16 has
    fewer bits for small numbers, so smaller values would lose precision.
    """
    if not FP16X3:
        operand = (x.to(DTYPE),)
    else:
        high = x.to(tl.float16)
        operand = (high, (x - high.to(tl.float32)).to(tl.float16))
    return operand


@triton.jit
def power_of_two(x):
    """Return the largest power of two not above x, positive and finite; 0 if x is below 2^-126."""
    bits = x.to(tl.int32, bitcast=True) & 0x7F800000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def peak_of(peaks, tensor, head, n_programs):
    """Return the address of the peak of one head, its largest finite magnitude.

    `peaks` has those of all tensors: the bits of float32 numbers as int32 (number of tensors,
    n_programs rounded up to a multiple of 4). `head` is the index among the heads of all batch
    elements, n_programs = batch * heads.
    """
    return peaks + tensor * ((n_programs + 3) // 4 * 4) + head


@triton.jit
def unit(peaks, tensor, head, n_programs):
    """Return the power of two by which a head is divided before it is split into float16 halves.

    It depends on the peak of the head. The arguments are those of `peak_of`.
    """
    bits = tl.load(peak_of(peaks, tensor, head, n_programs))
    peak = tl.maximum(bits, SMALLEST_BITS).to(tl.float32, bitcast=True)
    return power_of_two(peak) * TOP_INVERSE


@triton.jit
def scaled(x, peak):
    """Divide each row of x by a power of two, so that `as_operand` can split x into float16 halves.

    The function is called once for each tile of a sum of matmuls. The power of two of a row depends
    on its peak, the largest magnitude in this call and all earlier calls. It can therefore increase
    from call to call. x is a float32 tile. `peak` is from the previous call, or `SMALLEST` in the
    first.

    The result is the scaled x, the new peaks, and a factor for each row. The caller must multiply
    the sum of the earlier matmuls by these factors, which converts it to the new scale.
    """
    new_peak = tl.maximum(peak, tl.max(tl.abs(x), 1))
    row_unit = power_of_two(new_peak) * TOP_INVERSE
    correction = power_of_two(peak) / power_of_two(new_peak)
    return x * (1.0 / row_unit)[:, None], new_peak, correction


@triton.jit
def unscaled(total, peak):
    """Undo the scaling of `scaled` in the final sum of matmuls, with the peak of its last call."""
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
    """Return the matrix product of a and b in float32.

    The operands are from `load_operand` or `as_operand`. With FP16X3, the result is the sum of
    three matmuls: low * high, high * low and high * high. low * low is negligible and left out.
    PRECISION is the input precision of tl.dot for float32 tiles, "tf32" or "ieee".
    """
    if FP16X3:
        total = tl.dot(a[1], b[0])
        total = tl.dot(a[0], b[1], total)
        total = tl.dot(a[0], b[0], total)
    else:
        total = tl.dot(a[0], b[0], input_precision=PRECISION)
    return total


@triton.jit
def add_product(total, a, b, factor, FP16X3: tl.constexpr, PRECISION: tl.constexpr):
    """Return total + factor a b in float32, where a b is the matrix product of two operands.

    The factor undoes the scaling of operands with FP16X3. Without FP16X3, it must be 1.

    Without FP16X3, the tensor cores add the product to `total`. They round toward zero, so the
    errors of a long sum grow. With FP16X3, the addition is therefore done outside the tensor cores
    and rounds to nearest.

    `product` describes the arguments a, b, FP16X3 and PRECISION.
    """
    if FP16X3:
        total += product(a, b, FP16X3, PRECISION) * factor
    else:
        total = tl.dot(a[0], b[0], total, input_precision=PRECISION)
    return total


@triton.jit
def store_tile(
    base, first, n_rows, row_stride, values,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store a tile (ROWS, COLUMNS) of one head, converted to the dtype of the tensor.

    Rows past the end of the head and columns from HEAD_DIM on are not stored. For `base` and the
    stride, see `load_tile`.
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
    """Load ROWS contiguous numbers of one head, which has one for each row, such as log-sum-exps.

    `base` is the address of the first. With RAGGED, the range may extend past the last row, and the
    numbers past the end are zero. Otherwise, they are loaded without a mask.
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
    BLOCK: tl.constexpr, HAS_RIGHT: tl.constexpr, BY_KEYS: tl.constexpr,
):  # fmt: skip
    """Return the block, head and split that a program has to process.

    An item of work is a block of rows of one head, together with one range (split) of the inner
    loop. The function determines the order in which the items start.

    Heads are processed in groups. The tensors that the programs of a group have in common fit
    together in the L2 cache. In a causal pass, the items of a head have different lengths. Within a
    group, the long items start first, and the short items fill the gaps at the end. n_programs is
    batch * heads. Each split except the last has rows_per_split rows. With HAS_RIGHT, the mask has
    a right bound, as a causal mask has. With BY_KEYS, a block consists of keys and the inner loop
    goes over queries; else the opposite.
    """
    # Order of the blocks in a causal pass, without splits: from the last to the first block of
    # queries, or from the first to the last block of keys. With splits, the order is rotated for
    # each split. The blocks for which a split has no work come first, because they take almost no
    # time. After them, the items of different splits at the same position have about the same
    # length, and the length decreases. Consecutive items alternate between the splits, also without
    # a causal mask.
    items_per_head = n_blocks * n_splits
    first = item // (group * items_per_head) * group
    within = item % (group * items_per_head)
    size = min(group, n_programs - first)  # the last group may have fewer heads
    head = first + within % size
    split = within // size % n_splits
    block = within // size // n_splits
    if HAS_RIGHT:
        if BY_KEYS:
            n_seen = ((split + 1) * rows_per_split + BLOCK - 1) // BLOCK
            block += min(n_blocks, n_seen)
        else:
            block = n_blocks - 1 - block + split * rows_per_split // BLOCK
        block = block % n_blocks
    return block, head, split
