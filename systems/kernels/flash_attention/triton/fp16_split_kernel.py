"""Kernels that split a float32 tensor into two float16 tensors, the high and the low half.

The sum of the halves has a sign and 22 of the 24 significand bits of float32. Tensor cores multiply
float16 numbers exactly, so `tile_ops.product` can compute a float32 matmul from the halves.

The range of float16 is small. So each head is first divided by a power of two, which depends on the
largest magnitude of the head (its peak). `peak_kernel` computes the peaks.
"""

# Kernel arguments have Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from systems.kernels.flash_attention.triton.tile_ops import (
    as_operand,
    head_base,
    load_tile,
    peak_of,
    store_tile,
    unit,
)


@triton.jit
def _tile(
    first_whole, second_whole, third_whole, fourth_whole,
    whole_batch, whole_head, whole_row, n_heads, n_rows, n_seen,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return this program's tile, the index of the head and the index of the first row.

    Rows of the tile from n_seen on are zeros.
    """
    n_blocks = tl.cdiv(n_rows, ROWS)
    head = tl.program_id(0) // n_blocks
    first = tl.program_id(0) % n_blocks * ROWS
    index = tl.program_id(1)
    whole = first_whole
    if index == 1:
        whole = second_whole
    if index == 2:
        whole = third_whole
    if index == 3:
        whole = fourth_whole
    whole = head_base(whole, head, n_heads, whole_batch, whole_head)
    return load_tile(whole, first, n_seen, whole_row, HEAD_DIM, ROWS, COLUMNS, True), head, first


@triton.jit(do_not_specialize=["n_programs", "n_heads", "n_rows", "n_seen"])
def peak_kernel(
    first_whole, second_whole, third_whole, fourth_whole, peaks,
    whole_batch, whole_head, whole_row, n_programs, n_heads, n_rows, n_seen,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the largest magnitude of each head (its peak) of up to four tensors.

    The grid is that of `parts_kernel`. The kernel compares the bits of magnitudes as integers,
    which have the same order as the magnitudes. NaN counts as the largest magnitude.

    Args:
        peaks: output, which must be zeros before the launch. `tile_ops.peak_of` gives its shape.

    `parts_kernel` describes the other arguments.
    """
    x, head, _ = _tile(
        first_whole, second_whole, third_whole, fourth_whole, whole_batch, whole_head, whole_row,
        n_heads, n_rows, n_seen, HEAD_DIM, ROWS, COLUMNS,
    )  # fmt: skip
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    peak = tl.max(tl.max(magnitude, 1), 0)
    tl.atomic_max(peak_of(peaks, tl.program_id(1), head, n_programs), peak)


@triton.jit(do_not_specialize=["n_programs", "n_heads", "n_rows", "n_seen"])
def parts_kernel(
    first_whole, second_whole, third_whole, fourth_whole, peaks, out,
    whole_batch, whole_head, whole_row, n_programs, n_heads, n_rows, n_seen,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the float16 halves of up to four tensors.

    Grid: (number of blocks of ROWS rows * batch * heads, number of tensors to split).

    Args:
        *_whole: float32 (batch, heads, n_rows, HEAD_DIM), all with the same strides.
        peaks: as computed by `peak_kernel`.
        out: float16 (number of tensors, 2, batch, heads, n_rows, HEAD_DIM), contiguous, output. The
            high half is first.
        n_seen: number of rows of each head that are read; later rows are replaced by zeros.
    """
    x, head, first = _tile(
        first_whole, second_whole, third_whole, fourth_whole, whole_batch, whole_head, whole_row,
        n_heads, n_rows, n_seen, HEAD_DIM, ROWS, COLUMNS,
    )  # fmt: skip
    index = tl.program_id(1)
    high, low = as_operand(x * (1.0 / unit(peaks, index, head, n_programs)), tl.float16, 2)
    step = tl.cast(n_programs, tl.int64) * n_rows * HEAD_DIM
    out += index * 2 * step + head.to(tl.int64) * n_rows * HEAD_DIM
    store_tile(out, first, n_rows, HEAD_DIM, high, HEAD_DIM, ROWS, COLUMNS)
    store_tile(out + step, first, n_rows, HEAD_DIM, low, HEAD_DIM, ROWS, COLUMNS)
