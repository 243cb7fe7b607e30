"""Kernels that combine partial results of an attention pass that is split (see `work_splits`).

    combine_kernel   averages partial outputs, weighted by their log-sum-exps (Flash-Decoding)
    sum_kernel       adds partial gradients

The partial results are added in a fixed order, so the results are deterministic.
"""

# Kernel arguments have Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from systems.kernels.flash_attention.triton.forward_kernel import FLOOR
from systems.kernels.flash_attention.triton.tile_ops import (
    head_base,
    load_rows,
    load_tile,
    store_tile,
)


@triton.jit(do_not_specialize=["n_programs", "n_heads", "n_rows", "splits"])
def combine_kernel(
    partials, partial_lse, out, lse, out_batch, out_head, out_row,
    n_programs, n_heads, n_rows, splits,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Combine partial attention outputs, each computed from one range (split) of the keys.

    The partial output out_s of split s has the log-sum-exp lse_s. The result is

        lse = log(sum_s exp(lse_s))    out = sum_s exp(lse_s - lse) out_s

    Grid: (number of blocks of ROWS rows * batch * heads,).

    n_programs is batch * heads, strides are in elements, and COLUMNS is HEAD_DIM rounded up to a
    power of two, at least 16. The log-sum-exps are contiguous float32: partial_lse (splits, batch,
    heads, n_rows), -inf for a query that sees no key of the split, and the output lse (batch,
    heads, n_rows).

    Args:
        partials: float32 (splits, batch, heads, n_rows, HEAD_DIM), contiguous.
        out: output, (batch, heads, n_rows, HEAD_DIM).
    """
    n_blocks = tl.cdiv(n_rows, ROWS)
    head = tl.program_id(0) // n_blocks
    first = tl.program_id(0) % n_blocks * ROWS
    row = first + tl.arange(0, ROWS)
    there = row < n_rows
    step = tl.cast(n_programs, tl.int64) * n_rows  # number of rows per split
    rows_before = head.to(tl.int64) * n_rows

    maximum = tl.full((ROWS,), FLOOR, tl.float32)
    for split in tl.range(0, splits):
        partial = load_rows(partial_lse + split * step + rows_before, first, n_rows, ROWS, True)
        maximum = tl.maximum(maximum, partial)
    total = tl.zeros((ROWS,), tl.float32)
    accumulator = tl.zeros((ROWS, COLUMNS), tl.float32)
    for split in tl.range(0, splits):
        before = split * step + rows_before
        weight = tl.exp(load_rows(partial_lse + before, first, n_rows, ROWS, True) - maximum)
        partial = load_tile(
            partials + before * HEAD_DIM, first, n_rows, HEAD_DIM, HEAD_DIM, ROWS, COLUMNS, True
        )
        total += weight
        accumulator += weight[:, None] * partial

    seen = total != 0.0
    total = tl.where(seen, total, 1.0)
    row_lse = tl.where(seen, maximum + tl.log(total), float("-inf"))
    tl.store(lse + rows_before + row, row_lse, mask=there)
    out = head_base(out, head, n_heads, out_batch, out_head)
    result = accumulator / total[:, None]
    store_tile(out, first, n_rows, out_row, result, HEAD_DIM, ROWS, COLUMNS)


@triton.jit(do_not_specialize=["n_programs", "n_heads", "n_rows", "splits"])
def sum_kernel(
    partials, out, other, out_batch, out_head, out_row, other_batch, other_head, other_row,
    n_programs, n_heads, n_rows, splits,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add partial gradients in float32, for one gradient or for two (dK and dV).

    The sums, outputs, are (batch, heads, n_rows, HEAD_DIM). With one gradient, `other` is not
    written. `combine_kernel` describes the other arguments.

    Grid: (number of blocks of ROWS rows * batch * heads, number of gradients).

    Args:
        partials: float32 (number of gradients, splits, batch, heads, n_rows, HEAD_DIM), contiguous.
    """
    n_blocks = tl.cdiv(n_rows, ROWS)
    head = tl.program_id(0) // n_blocks
    first = tl.program_id(0) % n_blocks * ROWS
    step = tl.cast(n_programs, tl.int64) * n_rows * HEAD_DIM
    partials += head.to(tl.int64) * n_rows * HEAD_DIM + tl.program_id(1) * splits * step
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for split in tl.range(0, splits):
        total += load_tile(
            partials + split * step, first, n_rows, HEAD_DIM, HEAD_DIM, ROWS, COLUMNS, True
        )
    if tl.program_id(1) == 0:
        out = head_base(out, head, n_heads, out_batch, out_head)
        store_tile(out, first, n_rows, out_row, total, HEAD_DIM, ROWS, COLUMNS)
    else:
        other = head_base(other, head, n_heads, other_batch, other_head)
        store_tile(other, first, n_rows, other_row, total, HEAD_DIM, ROWS, COLUMNS)
