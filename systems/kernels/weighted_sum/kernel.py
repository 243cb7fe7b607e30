"""Introduction to Triton kernels: the weighted sum of each row, y = x w, forward and backward.

    x (n_rows, d)                     w (d,)
    +---------+---------+----         +---------+---------+----
    |  tile   |  tile   | ...   ROWS  |         |         |
    +---------+---------+----         +---------+---------+----
    |  tile   |  tile   | ...
    +---------+---------+----
      COLUMNS   COLUMNS

A kernel is written for one *program*, which 128 threads (by default) execute together. A launch
starts a *grid* of programs with the same arguments. Programs run concurrently and in any order, so
no program may wait for another. `tl.program_id` tells a program which part of the work it does.

Values in a kernel are *tiles*: arrays whose elements are distributed over the threads. The sizes of
a tile are powers of two and are known when the kernel is compiled (`tl.constexpr`).

Pointers. A kernel receives a tensor as the address of its first element. Element (r, c) is
r * stride_row + c * stride_d elements after this address. A tile of such offsets, added to the
address, gives a tile of addresses, which one `tl.load` reads. Because the strides are arguments, a
transposed or sliced x needs no copy. (`tl.make_block_ptr` and tensor descriptors are shorthands for
the same computation.)

64 bits. A tensor may have more than 2^31 elements, and an int32 offset would overflow silently. So
row and column indices are converted to int64 before they are multiplied by a stride.

Masks. n_rows and d are rarely multiples of the tile size, and memory after the end of a tensor must
not be accessed. A mask selects the valid elements of a tile. For the other elements, no memory is
accessed, and a load returns the value of its argument `other`. Here this value is zero, which does
not change a sum.

Accumulation. bfloat16 has 8 bits of precision. A sum of ones in bfloat16 stops at 256, because
256 + 1 rounds to 256. So tiles are converted to float32 when they are loaded, and they are summed
in float32. Only the result is rounded, when it is stored.

One reduction. The forward loop adds tiles element by element, which needs no communication between
threads. A sum across threads (`tl.sum`) is needed only once per row, after the loop.

Partial sums. dw, the gradient of w, is a sum over all rows, and the rows are distributed over many
programs. All programs could add to the same dw with `tl.atomic_add`. But the order of these
additions changes from run to run, and in floating point, (a + b) + c differs from a + (b + c). So
the last bits of the gradient would change from run to run. Instead, each program sums its rows in
order and writes the result to a separate row of a buffer. After the launch, torch sums the rows of
the buffer (autograd.py). The buffer takes programs * d float32 values of memory. The result is the
same in every run and on every GPU.
"""

# Arguments of Triton kernels have no type annotations.
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
    """Compute y[r] = sum over c of x[r, c] w[c], for ROWS rows in each program.

    Grid: (ceil(n_rows / ROWS),). Tensors are float32, bfloat16 or float16. x (n_rows, d) and w (d,)
    may have any strides, in elements. The output y (n_rows,) is contiguous. A tile is (ROWS,
    COLUMNS), powers of two.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, d, COLUMNS):
        column = start + tl.arange(0, COLUMNS).to(tl.int64)
        # Shapes (ROWS, 1) and (1, COLUMNS) broadcast to a whole tile, as in NumPy.
        there = (row < n_rows)[:, None] & (column < d)[None, :]
        offset = row[:, None] * x_stride_row + column[None, :] * x_stride_d
        tile = tl.load(x + offset, mask=there, other=0.0).to(tl.float32)
        weight = tl.load(w + column * w_stride, mask=column < d, other=0.0).to(tl.float32)
        total += tile * weight[None, :]
    # A store rounds to the element type of the pointer.
    tl.store(y + row, tl.sum(total, axis=1), mask=row < n_rows)


@triton.jit
def backward_kernel(
    dy, x, w, dx, dw_partial,
    n_rows, d,
    dy_stride, x_stride_row, x_stride_d, w_stride,
    NEEDS_DX: tl.constexpr, NEEDS_DW: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute dx[r, c] = dy[r] w[c], and partial sums of dw[c] = sum over r of dy[r] x[r, c].

    Grid: (ceil(d / COLUMNS), programs), where the caller chooses the number `programs`. Program
    (i, p) processes column tile i, and in this column tile the row tiles p, p + programs,
    p + 2 programs, and so on. The partial sum of dw of a program stays in registers until the end.
    A program reads each element of dy once for both gradients.

    The other arguments are those of `forward_kernel`.

    Args:
        dy: (n_rows,), any stride; `y.sum().backward()` passes an expanded scalar, with stride 0.
        dx: output if NEEDS_DX, (n_rows, d), contiguous.
        dw_partial: output if NEEDS_DW, float32 (programs, d), contiguous. Its rows add up to dw.
    """
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    weight = tl.load(w + column * w_stride, mask=column < d, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    first = tl.program_id(1).to(tl.int64) * ROWS
    for start in range(first, n_rows, tl.num_programs(1) * ROWS):
        row = start + tl.arange(0, ROWS)
        there = (row < n_rows)[:, None] & (column < d)[None, :]
        slope = tl.load(dy + row * dy_stride, mask=row < n_rows, other=0.0).to(tl.float32)
        if NEEDS_DX:  # known at compile time, so the compiler removes a branch that is not taken
            tl.store(dx + row[:, None] * d + column[None, :], slope[:, None] * weight, mask=there)
        if NEEDS_DW:
            offset = row[:, None] * x_stride_row + column[None, :] * x_stride_d
            tile = tl.load(x + offset, mask=there, other=0.0).to(tl.float32)
            total += slope[:, None] * tile
    if NEEDS_DW:
        mine = dw_partial + tl.program_id(1).to(tl.int64) * d + column
        tl.store(mine, tl.sum(total, axis=0), mask=column < d)
