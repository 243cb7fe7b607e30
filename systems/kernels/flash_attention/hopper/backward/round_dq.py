"""Kernel that runs after the Hopper backward kernels and converts their float32 sum of dQ to dQ."""

# Kernel arguments have Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from systems.kernels.flash_attention.hopper.packed_blocks import padded_tile
from systems.kernels.flash_attention.triton.tile_ops import head_base


@triton.jit(do_not_specialize=["n_heads", "n_queries", "n_padded", "n_sequences"])
def convert_kernel(
    dq_sum, dquery, starts_q, dq_batch, dq_head, dq_row, n_heads, n_queries, n_padded, n_sequences,
    scale, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, DQ_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Convert the float32 sum of dQ to dQ: multiply it by the scale, reorder and round it.

    The Hopper backward kernels compute this sum, without the scale.

    Grid: (n_padded // ROWS * batch * heads,).

    `prepare_kernel` describes the other arguments.

    Args:
        dq_sum: float32 (batch, heads, n_padded // ROWS, DQ_COLUMNS // 64, ROWS // 8, 64, 8),
            contiguous: dQ / scale. The dimensions of a tile of ROWS queries are the high part of
            the column, the high part of the query, and the low parts of both (see
            `backward.rings.add_dq`).
        dquery: (batch, heads, n_queries, HEAD_DIM), strides in elements, output: dQ, rounded to its
            dtype. The elements of a row are contiguous.
        COLUMNS: DQ_COLUMNS or more, a power of two.
        DQ_COLUMNS: number of columns of the sum of dQ, HEAD_DIM or more.
        ROWS: number of queries per tile. Each program converts one tile.
    """
    n_blocks = n_padded // ROWS
    head = tl.program_id(0) // n_blocks
    start, first, n_rows = padded_tile(
        starts_q, tl.program_id(0) % n_blocks, n_sequences, n_queries, ROWS, PACKED
    )
    column = tl.arange(0, ROWS)
    element = tl.arange(0, COLUMNS)
    tile = dq_sum + tl.program_id(0).to(tl.int64) * (ROWS * DQ_COLUMNS)
    place = tl.arange(0, COLUMNS * ROWS)
    if DQ_COLUMNS < COLUMNS:
        value = tl.load(tile + place, mask=place < DQ_COLUMNS * ROWS, other=0.0)
    else:
        value = tl.load(tile + place)
    value = value.reshape(COLUMNS // 64, ROWS // 8, 64, 8)
    value = value.permute(1, 3, 0, 2).reshape(ROWS, COLUMNS) * scale
    dquery = head_base(dquery, head, n_heads, dq_batch, dq_head) + start.to(tl.int64) * dq_row
    row = first + column
    pointers = dquery + row[:, None].to(tl.int64) * dq_row + element[None, :]
    there = row[:, None] < n_rows
    if HEAD_DIM < COLUMNS:
        there = there & (element[None, :] < HEAD_DIM)
    tl.store(pointers, value.to(dquery.dtype.element_ty), mask=there)
