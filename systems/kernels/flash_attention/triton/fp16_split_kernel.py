"""Kernels that split a float32 tensor into two float16 tensors, its high half and its low half.

The high half of a number is the number rounded to float16. The low half is the rounding error, also
rounded to float16. The sum of the halves has a sign and 22 of the 24 significand bits of float32.
Tensor cores multiply float16 numbers exactly, so `tile_ops.product` can compute a float32 matmul
from the halves.

The range of float16 is small. So `parts_kernel` first divides each head by a power of two. The
power of two depends on the largest magnitude of the head (its peak), which `peak_kernel` computes.
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
    """Load the block of rows that this program processes, from one of up to four tensors.

    The second grid index selects the tensor. Each tensor has the shape (batch, heads, n_rows,
    HEAD_DIM).

    Args:
        *_whole: addresses of the tensors, which have equal strides.
        whole_*: strides of the tensors.
        n_seen: number of rows of each head that are read; later rows of the block are zeros.

    Returns:
        the block (ROWS, COLUMNS), the index of its head among the heads of all batch elements, and
        the index of its first row in the head.
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
    """Compute the peak of each head, its largest magnitude, for up to four tensors.

    If a head contains NaN, its peak is NaN. The kernel finds the maximum with integer operations on
    the bits of the magnitudes, because magnitudes have the same order as their bits.

    The grid and all arguments except `peaks` are those of `parts_kernel`.

    Args:
        peaks: output, as described by `tile_ops.peak_of`. It must be zeros before the launch.
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
    """Split up to four float32 tensors into float16 halves.

    Each head is first divided by a power of two that depends on its largest magnitude. Then the
    high half of a number is the number rounded to float16, and the low half is the rounding error.

    Grid: (number of blocks of ROWS rows * batch * heads, number of tensors to split).

    Args:
        *_whole: float32 (batch, heads, n_rows, HEAD_DIM), all with the same strides.
        peaks: largest magnitude of each head, as computed by `peak_kernel`.
        out: output, float16 (number of tensors, 2, batch, heads, n_rows, HEAD_DIM), contiguous. In
            the second dimension, index 0 is the high half, and index 1 is the low half.
        whole_*: strides of the tensors to split, in elements.
        n_programs: batch * heads.
        n_seen: number of rows of each head that are read; later rows are replaced by zeros.
        ROWS: number of rows per program.
        COLUMNS: HEAD_DIM rounded up to a power of two, at least 16.
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
