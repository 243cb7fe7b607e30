"""Kernel that runs before the Hopper kernels of the backward pass, and computes their inputs."""

# Kernel arguments have Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from systems.kernels.flash_attention.hopper.packed_blocks import padded_tile
from systems.kernels.flash_attention.triton.tile_ops import head_base, load_tile

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["n_heads", "n_queries", "n_padded", "n_sequences", "n_sums"])
def prepare_kernel(
    out, dout, lse, dlse, starts_q, log2_lse, minus_delta, dq_sum, sums, counter,
    out_batch, out_head, out_row, dout_batch, dout_head, dout_row, n_heads, n_queries, n_padded,
    n_sequences, n_sums, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    PACKED: tl.constexpr, HAS_DLSE: tl.constexpr, DQ_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute lse in base 2 and -delta of each query, and write zeros to the sums of gradients.

    lse is the log-sum-exp of the scores of a query, and delta is rowsum(dO * O) - dlse. The
    gradient of a score is its probability times dP - delta, and the gradient of lse adds its
    probability times dlse.

    Grid: (n_padded // ROWS * batch * heads,).

    Args:
        out, dout: O and dO, (batch, heads, n_queries, HEAD_DIM), strides in elements. The elements
            of a row are contiguous.
        lse: float32 (batch, heads, n_queries), contiguous, natural logarithm.
        dlse: gradient of lse, with its dtype, shape and layout. Read only if HAS_DLSE.
        starts_q: boundaries of packed sequences, int32 (n_sequences + 1,). Read only if PACKED.
        log2_lse: float32 (batch, heads, n_padded), contiguous, output: lse in base 2. Past
            n_queries it is inf, so that the backward kernels compute probabilities of 0.
        minus_delta: float32 (batch, heads, n_padded), contiguous, output: -delta. It is 0 past
            n_queries, and for a query that sees no key.
        dq_sum: float32 (batch * heads * n_padded * DQ_COLUMNS,), output: zeros.
        sums: float32 (n_sums,), output: zeros, see `backward.sums`.
        counter: int32 (1,), output: zero.
        n_padded: n_queries rounded up to a multiple of ROWS. With packed sequences, each sequence
            is padded, and starts where `packed_blocks.padded_start` places it.
        COLUMNS: HEAD_DIM or more, a power of two.
        ROWS: number of queries per program. It must be 64.
        PACKED: whether rows belong to packed sequences. n_queries are then the rows of all.
        DQ_COLUMNS: number of columns of dQ in the backward kernel, a multiple of ROWS.

    Every 64 values of log2_lse and minus_delta are stored in the order in which the function
    `backward.rings.row_of` reads them.
    """
    n_blocks = n_padded // ROWS
    head = tl.program_id(0) // n_blocks
    tile = tl.program_id(0) % n_blocks
    start, first, n_rows = padded_tile(starts_q, tile, n_sequences, n_queries, ROWS, PACKED)
    out = head_base(out, head, n_heads, out_batch, out_head) + start.to(tl.int64) * out_row
    dout = head_base(dout, head, n_heads, dout_batch, dout_head) + start.to(tl.int64) * dout_row
    o = load_tile(out, first, n_rows, out_row, HEAD_DIM, ROWS, COLUMNS, True)
    do = load_tile(dout, first, n_rows, dout_row, HEAD_DIM, ROWS, COLUMNS, True)
    total = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    column = tl.arange(0, ROWS)
    row = first + column
    row_lse = lse + head.to(tl.int64) * n_queries + start + row
    row_lse = tl.load(row_lse, mask=row < n_rows, other=float("inf"))
    if HAS_DLSE:
        row_dlse = dlse + head.to(tl.int64) * n_queries + start + row
        total -= tl.load(row_dlse, mask=row < n_rows, other=0.0)
    before = head.to(tl.int64) * n_padded
    # In the result of a WGMMA, four threads hold each row. Thread t has the columns 8 j + 2 t + e
    # with e = 0 or 1. Store each four of its values contiguously, and these groups of the four
    # threads one after another, so that they are in different banks of shared memory.
    place = tile * ROWS + column // 16 * 16 + column // 2 % 4 * 4 + column // 8 % 2 * 2 + column % 2
    tl.store(log2_lse + before + place, row_lse * LOG2E)
    # A query that sees no key has probabilities of 0. Its gradients must be 0, too, whatever the
    # gradient of its log-sum-exp is.
    total = tl.where(row_lse == float("-inf"), 0.0, total)
    tl.store(minus_delta + before + place, -total)
    zeros = tl.zeros((ROWS, ROWS), tl.float32)
    square = dq_sum + (before + tile * ROWS) * DQ_COLUMNS + column[:, None] * ROWS + column[None, :]
    for part in tl.static_range(DQ_COLUMNS // ROWS):
        tl.store(square + part * (ROWS * ROWS), zeros)
    each = tl.cdiv(tl.cdiv(n_sums, tl.num_programs(0)), ROWS * ROWS) * (ROWS * ROWS)
    start = tl.program_id(0).to(tl.int64) * each
    for part in range(0, each, ROWS * ROWS):
        index = start + part + column[:, None] * ROWS + column[None, :]
        tl.store(sums + index, zeros, mask=index < n_sums)
    if tl.program_id(0) == 0:
        tl.store(counter, 0)
