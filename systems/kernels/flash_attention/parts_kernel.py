"""float32 as three bfloat16 numbers that add up to it, each eight of its 24 bits.

What tensor cores multiply exactly; `tiles.add_product` says of which products float32 is made.
"""

# Arguments of a kernel are Triton's, which has no types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from systems.kernels.flash_attention.tiles import head_base, load_tile, split, store_tile


@triton.jit(do_not_specialize=["n_programs", "n_heads", "n_rows"])
def parts_kernel(
    first_whole, second_whole, third_whole, fourth_whole, out,
    whole_batch, whole_head, whole_row, n_programs, n_heads, n_rows,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of ROWS rows * batch * heads, how many of the four are cut).

    Args:
        *_whole: float32 (batch, heads, n_rows, HEAD_DIM), all with the same strides.
        out: bfloat16 (1 to 4, 3, batch, heads, n_rows, HEAD_DIM), contiguous, written, the largest
            part first.
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
    x = load_tile(whole, first, n_rows, whole_row, HEAD_DIM, ROWS, COLUMNS, True)
    high, middle, low = split(x, tl.bfloat16, 3)
    step = tl.cast(n_programs, tl.int64) * n_rows * HEAD_DIM
    out += index * 3 * step + head.to(tl.int64) * n_rows * HEAD_DIM
    store_tile(out, first, n_rows, HEAD_DIM, high, HEAD_DIM, ROWS, COLUMNS)
    store_tile(out + step, first, n_rows, HEAD_DIM, middle, HEAD_DIM, ROWS, COLUMNS)
    store_tile(out + 2 * step, first, n_rows, HEAD_DIM, low, HEAD_DIM, ROWS, COLUMNS)
