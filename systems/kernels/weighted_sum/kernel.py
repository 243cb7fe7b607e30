"""The weighted sum of each row in Triton, forward and backward. A way in, so it explains itself.

    x (n_rows, d)                     w (d,)
    +---------+---------+----         +---------+---------+----
    |  tile   |  tile   | ...   ROWS  |         |         |
    +---------+---------+----         +---------+---------+----
    |  tile   |  tile   | ...
    +---------+---------+----
      COLUMNS   COLUMNS

A kernel is written for one *program*, a few hundred threads that work as one. A launch starts a
*grid* of programs, all with the same arguments; they run in any order and at the same time, so no
program may wait for another, and `tl.program_id` alone tells a program which part is its own.

Values in a kernel are *tiles*: blocks of numbers spread over the threads, shaped by powers of two
that are known when the kernel is compiled (`tl.constexpr`). So:

Pointers. A tensor arrives as the address of its first element. Element (r, c) lies
r * stride_row + c * stride_d elements further: add a tile of such offsets to the address, and it is
a tile of addresses that one `tl.load` fetches. With the strides passed in, a transposed or sliced x
needs no copy. (`tl.make_block_ptr` and tensor descriptors are shorthands for the same sums.)

64 bits. A tensor may have more than 2^31 elements, and an int32 offset would wrap without a word.
Row and column numbers are int64 before they are multiplied by a stride.

Masks. n_rows and d are seldom multiples of a tile, and what lies past the end belongs to someone
else. A mask says which lanes are there; the others are not touched, and read as `other`. Zero is
right here, since it adds nothing to a sum.

Accumulation. bfloat16 has 8 bits of precision: add ones up in it and the sum stops at 256, where
256 + 1 rounds to 256. Tiles are widened to float32 as they are loaded, summed so, and rounded once,
at the store.

One reduction. The forward adds tiles element by element, which stays within a thread, and sums
across threads (`tl.sum`) once a row, after the loop.

Partial sums. dw is a sum over all rows, which belong to many programs. `tl.atomic_add` into one dw
would be short, but the order in which programs arrive changes from run to run, and (a + b) + c is
not a + (b + c) in floating point: the gradient would differ in its last bits each time. So each
program sums its own rows in order, writes the result into a row of a buffer that is its alone, and
the launcher adds up those rows in order. It costs programs * d float32 of memory, and is the same
on every run and every GPU.
"""

# Arguments of a kernel are Triton's, which has no types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def forward_kernel(
    x, w, y,
    n_rows, d,
    x_stride_row, x_stride_d, w_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """y[r] = sum over c of x[r, c] w[c] for the ROWS rows of this program.

    Grid: (ceil(n_rows / ROWS),).

    Args:
        x: (n_rows, d), any strides. w: (d,), any stride. y: (n_rows,), contiguous, written.
            All float32, bfloat16 or float16.
        x_stride_row, x_stride_d, w_stride: elements from one to the next.
        ROWS, COLUMNS: of a tile; powers of two.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, d, COLUMNS):
        column = start + tl.arange(0, COLUMNS).to(tl.int64)
        # (ROWS, 1) and (1, COLUMNS) broadcast to a whole tile, as in NumPy.
        there = (row < n_rows)[:, None] & (column < d)[None, :]
        offset = row[:, None] * x_stride_row + column[None, :] * x_stride_d
        tile = tl.load(x + offset, mask=there, other=0.0).to(tl.float32)
        weight = tl.load(w + column * w_stride, mask=column < d, other=0.0).to(tl.float32)
        total += tile * weight[None, :]
    # A store rounds to what its pointer points to.
    tl.store(y + row, tl.sum(total, axis=1), mask=row < n_rows)


@triton.jit
def backward_kernel(
    dy, x, w, dx, dw_partial,
    n_rows, d,
    dy_stride, x_stride_row, x_stride_d, w_stride,
    NEEDS_DX: tl.constexpr, NEEDS_DW: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dx[r, c] = dy[r] w[c], and the sum of dy[r] x[r, c] over the rows of this program.

    Grid: (ceil(d / COLUMNS), programs). A program stays in its columns and goes down the rows,
    every programs-th tile of them, so that its part of dw stays in registers until the end and x
    and dy are read once for both gradients.

    Args:
        dy: (n_rows,), any stride: 0 for what `y.sum().backward()` hands over, one 1 expanded.
        x, w: as the forward was given them.
        dx: (n_rows, d), contiguous, written where NEEDS_DX.
        dw_partial: float32 (programs, d), contiguous, written where NEEDS_DW.
    """
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    weight = tl.load(w + column * w_stride, mask=column < d, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    first = tl.program_id(1).to(tl.int64) * ROWS
    for start in range(first, n_rows, tl.num_programs(1) * ROWS):
        row = start + tl.arange(0, ROWS)
        there = (row < n_rows)[:, None] & (column < d)[None, :]
        slope = tl.load(dy + row * dy_stride, mask=row < n_rows, other=0.0).to(tl.float32)
        if NEEDS_DX:  # known at compile time: the branch not taken is not there
            tl.store(dx + row[:, None] * d + column[None, :], slope[:, None] * weight, mask=there)
        if NEEDS_DW:
            offset = row[:, None] * x_stride_row + column[None, :] * x_stride_d
            tile = tl.load(x + offset, mask=there, other=0.0).to(tl.float32)
            total += slope[:, None] * tile
    if NEEDS_DW:
        mine = dw_partial + tl.program_id(1).to(tl.int64) * d + column
        tl.store(mine, tl.sum(total, axis=0), mask=column < d)
