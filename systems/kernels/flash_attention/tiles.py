"""Tiles of rows by columns, and the order in which programs take them: parts of all passes.

A tensor of any leading dimensions comes as (batch, heads, rows, head_dim) with the strides of its
first three; elements of a row lie side by side. Offsets of a tile are 64 bits wide, those within
one 32: the launcher sees to it that a row's stride is below `configurations.MAX_ROW_STRIDE`.

float32 comes as three bfloat16 tensors of the same shape, PARTS = 3, that add up to it: tensor
cores multiply 16-bit numbers exactly, and six of the nine products of the parts hold all that
float32 can (Henry, Tang and Heinecke 2019, "Leveraging the bfloat16 artificial intelligence
datatype for higher-precision computations"). A tile is a tuple of its parts, of one where
PARTS = 1.
"""

# Arguments of a kernel are Triton's, which has no types, and its tuples have any length.
# mypy: disable-error-code="assignment"
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl


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
        middle = load_tile(base, first, n_rows, row_stride, HEAD_DIM, ROWS, COLUMNS, RAGGED)
        base += part_stride
        low = load_tile(base, first, n_rows, row_stride, HEAD_DIM, ROWS, COLUMNS, RAGGED)
        parts = (high, middle, low)
    return parts


@triton.jit
def split(x, DTYPE: tl.constexpr, PARTS: tl.constexpr):
    """A float32 tile as its parts in bfloat16, or rounded to DTYPE where PARTS = 1."""
    if PARTS == 1:
        parts = (x.to(DTYPE),)
    else:
        high = x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        parts = (high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16))
    return parts


@triton.jit
def transposed(x, PARTS: tl.constexpr):
    if PARTS == 1:
        parts = (tl.trans(x[0]),)
    else:
        parts = (tl.trans(x[0]), tl.trans(x[1]), tl.trans(x[2]))
    return parts


@triton.jit
def product(a, b, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """a b in float32, the smallest products first; PRECISION is that of float32 tiles."""
    if PARTS == 3:
        total = tl.dot(a[2], b[0])
        total = tl.dot(a[0], b[2], total)
        total = tl.dot(a[1], b[1], total)
        total = tl.dot(a[1], b[0], total)
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
    if PARTS == 3:
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
def schedule(n_blocks, n_programs, group, LAST_FIRST: tl.constexpr):
    """(block, head) of this program, of n_blocks * n_programs.

    Heads come in groups that share the L2 cache. Within a group the first blocks of all heads come
    before the second ones, from the other end where LAST_FIRST: so the longest of a causal pass
    start first and the short ones fill the gaps that they leave (longest processing time first).

    Args:
        n_programs: batch * heads.
        group: heads of a group.
    """
    program = tl.program_id(0)
    of_group = program // (group * n_blocks)
    within = program % (group * n_blocks)
    first = of_group * group
    size = tl.minimum(group, n_programs - first)  # the last group may be smaller
    block = within // size
    if LAST_FIRST:
        block = n_blocks - 1 - block
    return block, first + within % size
