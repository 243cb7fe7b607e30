"""Kernels that split a float32 tensor into two float16 tensors, its high half and its low half.

The high half of a number is the number rounded to float16. The low half is the rounding error, also
rounded to float16. `tile_ops` explains their use.

The range of float16 is small. So `parts_kernel` first divides each head by a power of two. The
power of two depends on the largest magnitude of the head (its peak), which `peak_kernel` computes.
"""

# Kernel arguments have Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from systems.kernels.flash_attention.triton.mask_ops import (
    n_matrices,
    rows_before,
    sequence_base,
    sequence_rows,
)
from systems.kernels.flash_attention.triton.tile_ops import (
    INFINITE_BITS,
    as_operand,
    load_tile,
    peak_of,
    store_tile,
    unit,
)


@triton.jit
def _tile(
    first_whole, second_whole, third_whole, fourth_whole, starts,
    whole_batch, whole_head, whole_row, n_programs, n_heads, total_rows, n_seen,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Load the block of rows that this program processes, from one of up to four tensors.

    The second grid index selects the tensor. `parts_kernel` describes the arguments. Returns the
    block (ROWS, COLUMNS), the index of its head among the heads of all batch elements, the index of
    its first row in the sequence, and the first row and the number of rows of the sequence.
    """
    n_blocks = tl.cdiv(total_rows, ROWS)
    if PACKED:
        n_blocks = tl.num_programs(0) // n_programs
    head = tl.program_id(0) // n_blocks
    first = tl.program_id(0) % n_blocks * ROWS
    start, n_rows = sequence_rows(starts, head, n_heads, total_rows, PACKED)
    index = tl.program_id(1)
    whole = first_whole
    if index == 1:
        whole = second_whole
    if index == 2:
        whole = third_whole
    if index == 3:
        whole = fourth_whole
    whole = sequence_base(whole, head, n_heads, start, whole_batch, whole_head, whole_row)
    n_read = tl.minimum(n_rows, n_seen)
    x = load_tile(whole, first, n_read, whole_row, HEAD_DIM, ROWS, COLUMNS, True)
    return x, head, first, start, n_rows


@triton.jit(do_not_specialize=["n_programs", "n_heads", "total_rows", "n_seen"])
def peak_kernel(
    first_whole, second_whole, third_whole, fourth_whole, starts, peaks,
    whole_batch, whole_head, whole_row, n_programs, n_heads, total_rows, n_seen,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Compute the peak of each head, its largest finite magnitude, for up to four tensors.

    Infinities and NaN have no scale. Their halves are infinite or NaN with any scale, and so are
    the results of the rows that see them. The kernel finds the maximum with integer operations on
    the bits of the magnitudes, because magnitudes have the same order as their bits.

    The grid and all arguments except `peaks` are those of `parts_kernel`. The output `peaks` is
    described by `tile_ops.peak_of`. It must be zeros before the launch.
    """
    x, head, _, _, _ = _tile(
        first_whole, second_whole, third_whole, fourth_whole, starts, whole_batch, whole_head,
        whole_row, n_programs, n_heads, total_rows, n_seen, HEAD_DIM, ROWS, COLUMNS, PACKED,
    )  # fmt: skip
    magnitude = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    magnitude = tl.where(magnitude < INFINITE_BITS, magnitude, 0)
    peak = tl.max(tl.max(magnitude, 1), 0)
    tl.atomic_max(peak_of(peaks, tl.program_id(1), head, n_programs), peak)


@triton.jit(do_not_specialize=["n_programs", "n_heads", "total_rows", "n_seen"])
def parts_kernel(
    first_whole, second_whole, third_whole, fourth_whole, starts, peaks, out,
    whole_batch, whole_head, whole_row, n_programs, n_heads, total_rows, n_seen,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Split up to four float32 tensors into float16 halves, each head divided by a power of two.

    Grid: (number of blocks of ROWS rows * batch * heads, number of tensors to split). With PACKED,
    total_rows are those of all sequences, batch is the number of sequences, and the number of
    blocks is that of the longest sequence.

    Args:
        *_whole: float32 (batch, heads, total_rows, HEAD_DIM), with the same strides, in elements.
        starts: boundaries of the sequences (see `mask_ops.sequence_rows`); read only with PACKED.
        out: output, float16 (number of tensors, 2, batch, heads, total_rows, HEAD_DIM), contiguous.
            In the second dimension, index 0 is the high half, and index 1 is the low half.
        n_seen: rows of each sequence that are read; later rows are replaced by zeros.
        COLUMNS: HEAD_DIM rounded up to a power of two, at least 16.
    """
    x, head, first, start, n_rows = _tile(
        first_whole, second_whole, third_whole, fourth_whole, starts, whole_batch, whole_head,
        whole_row, n_programs, n_heads, total_rows, n_seen, HEAD_DIM, ROWS, COLUMNS, PACKED,
    )  # fmt: skip
    index = tl.program_id(1)
    high, low = as_operand(x * (1.0 / unit(peaks, index, head, n_programs)), tl.float16, 2)
    step = tl.cast(n_matrices(n_programs, n_heads, PACKED), tl.int64) * total_rows * HEAD_DIM
    before = rows_before(head, n_heads, total_rows, start, PACKED)
    out += index * 2 * step + before * HEAD_DIM
    store_tile(out, first, n_rows, HEAD_DIM, high, HEAD_DIM, ROWS, COLUMNS)
    store_tile(out + step, first, n_rows, HEAD_DIM, low, HEAD_DIM, ROWS, COLUMNS)
