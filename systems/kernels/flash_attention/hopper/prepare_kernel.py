"""Before the backward kernels for Hopper: D, lse in base 2, and zeros for dQ's sums."""

# Arguments of a kernel are Triton's, which has no types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from systems.kernels.flash_attention.triton.tile_ops import head_base, load_tile

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["n_heads", "n_queries", "n_padded"])
def prepare_kernel(
    out, dout, lse, log2_lse, minus_delta, dq_sum, counter,
    out_batch, out_head, out_row, dout_batch, dout_head, dout_row, n_heads, n_queries, n_padded,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute what the backward kernels read per query, and zero what they add to.

    Grid: (n_padded // ROWS * batch * heads,).

    Args:
        out, dout: (batch, heads, n_queries, HEAD_DIM).
        lse: float32 (batch, heads, n_queries), contiguous; natural logarithms.
        log2_lse, minus_delta: float32 (batch, heads, n_padded), contiguous, written: lse in base 2
            and -rowsum(dout * out). Past n_queries inf, which makes P zero, and 0. Every 64 values
            are in the order in which `row_of` reads them.
        dq_sum: float32 (batch * heads * n_padded * HEAD_DIM,), written: zeros.
        counter: int32 (1,), written: zero.
        n_padded: n_queries rounded up to a multiple of ROWS, which is 64.
    """
    n_blocks = n_padded // ROWS
    head = tl.program_id(0) // n_blocks
    first = tl.program_id(0) % n_blocks * ROWS
    out = head_base(out, head, n_heads, out_batch, out_head)
    dout = head_base(dout, head, n_heads, dout_batch, dout_head)
    o = load_tile(out, first, n_queries, out_row, HEAD_DIM, ROWS, HEAD_DIM, True)
    do = load_tile(dout, first, n_queries, dout_row, HEAD_DIM, ROWS, HEAD_DIM, True)
    total = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    column = tl.arange(0, ROWS)
    row = first + column
    before = head.to(tl.int64) * n_padded
    row_lse = tl.load(
        lse + head.to(tl.int64) * n_queries + row, mask=row < n_queries, other=float("inf")
    )
    # In the layout of a matmul thread t of four has columns 8 j + 2 t + e: make them contiguous.
    place = first + column // 2 % 4 * 16 + column // 8 * 2 + column % 2
    tl.store(log2_lse + before + place, row_lse * LOG2E)
    tl.store(minus_delta + before + place, -total)
    element = tl.arange(0, HEAD_DIM)
    zeros = tl.zeros((ROWS, HEAD_DIM), tl.float32)
    tl.store(dq_sum + (before + row[:, None]) * HEAD_DIM + element[None, :], zeros)
    if tl.program_id(0) == 0:
        tl.store(counter, 0)
