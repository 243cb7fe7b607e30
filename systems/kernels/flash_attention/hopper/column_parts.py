"""Float32 sums of 64 rows in the registers of a consumer, in one tensor or in two.

A sum is the output of forward, or dK or dV of backward: the result of many WGMMAs, each of which
adds a product of a left operand in registers and a tile in shared memory.

The number of columns of a tensor in registers is a power of two. A sum with three quarters of the
columns of a tile is therefore a tuple of two tensors: 192 columns are 128 and 64, and 96 columns
are 64 and 32. Otherwise, the sum is a tuple of one tensor. In this module, IN_PARTS is True for two
tensors. A tile is then a tuple of two parts with these columns. TILE is the number of columns of
the tiles in shared memory: 256 or 128 for a sum in parts, otherwise the number of columns of the
sum.
"""

# Kernel arguments have Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False
# A tuple of one tensor or of two, by a constant
# mypy: disable-error-code=assignment

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from systems.kernels.flash_attention.hopper.registers import scale_rows, store_rows

ROWS = gl.constexpr(64)


@gluon.jit
def zeros(TILE: gl.constexpr, IN_PARTS: gl.constexpr):
    """Return a sum of zeros, float32 (64, TILE), or (64, TILE * 3 / 4) if IN_PARTS is True."""
    if IN_PARTS:
        low: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE // 2, 16])
        high: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE // 4, 16])
        sums = (
            gl.zeros([ROWS, TILE // 2], gl.float32, low),
            gl.zeros([ROWS, TILE // 4], gl.float32, high),
        )
    else:
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
        sums = (gl.zeros([ROWS, TILE], gl.float32, layout),)
    return sums


@gluon.jit
def operands(p, TILE: gl.constexpr, IN_PARTS: gl.constexpr):
    """Return p as left operands of WGMMAs, a tuple with one for each tensor of a sum.

    p is 16-bit (64, n), in the registers of the result of a WGMMA. They are not copied.
    """
    if IN_PARTS:
        low: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE // 2, 16])
        high: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE // 4, 16])
        converted = (
            gl.convert_layout(p, gl.DotOperandLayout(0, low, 2), assert_trivial=True),
            gl.convert_layout(p, gl.DotOperandLayout(0, high, 2), assert_trivial=True),
        )
    else:
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
        converted = (gl.convert_layout(p, gl.DotOperandLayout(0, layout, 2), assert_trivial=True),)
    return converted


@gluon.jit
def parts_of(tile, IN_PARTS: gl.constexpr):
    """Return the parts of a tile (n, TILE) in shared memory, a tuple with one for each tensor."""
    if IN_PARTS:
        TILE: gl.constexpr = tile.shape[1]
        parts = tile.slice(0, TILE // 2, 1), tile.slice(TILE // 2, TILE // 4, 1)
    else:
        parts = (tile,)
    return parts


@gluon.jit
def add_product(p, tile, sums, IN_PARTS: gl.constexpr):
    """Issue the asynchronous WGMMAs that add p times a tile in shared memory to a sum.

    p is the result of `operands`, and `tile` that of `parts_of`. The registers of p must not change
    before the WGMMAs are complete. The new sum is returned, and is valid after a wait.
    """
    if IN_PARTS:
        issued = (
            warpgroup_mma(p[0], tile[0], sums[0], is_async=True),
            warpgroup_mma(p[1], tile[1], sums[1], is_async=True),
        )
    else:
        issued = (warpgroup_mma(p[0], tile[0], sums[0], is_async=True),)
    return issued


@gluon.jit
def wait(sums, p, IN_PARTS: gl.constexpr):
    """Wait for all WGMMAs, and return the sum of `add_product`. p is its first argument."""
    if IN_PARTS:
        low, high, _, _ = warpgroup_mma_wait(0, deps=[sums[0], sums[1], p[0], p[1]])
        done = (low, high)
    else:
        whole, _ = warpgroup_mma_wait(0, deps=[sums[0], p[0]])
        done = (whole,)
    return done


@gluon.jit
def wait_for_both(sums, p, other_sums, other_p, IN_PARTS: gl.constexpr):
    """Wait for all WGMMAs, and return two sums of equal sizes, see `wait`."""
    if IN_PARTS:
        low, high, other_low, other_high, _, _, _, _ = warpgroup_mma_wait(
            0,
            deps=[
                sums[0], sums[1], other_sums[0], other_sums[1], p[0], p[1], other_p[0], other_p[1]
            ],
        )  # fmt: skip
        done = (low, high)
        other_done = (other_low, other_high)
    else:
        whole, _, other, _ = warpgroup_mma_wait(0, deps=[sums[0], p[0], other_sums[0], other_p[0]])
        done = (whole,)
        other_done = (other,)
    return done, other_done


@gluon.jit
def scale_each_row(sums, factors, IN_PARTS: gl.constexpr):
    """Multiply the rows of a sum by factors, see `registers.scale_rows`."""
    if IN_PARTS:
        scaled = (scale_rows(sums[0], factors), scale_rows(sums[1], factors))
    else:
        scaled = (scale_rows(sums[0], factors),)
    return scaled


@gluon.jit
def scale_all(sums, factor, IN_PARTS: gl.constexpr):
    """Multiply a sum by a number."""
    if IN_PARTS:
        scaled = (sums[0] * factor, sums[1] * factor)
    else:
        scaled = (sums[0] * factor,)
    return scaled


@gluon.jit
def store_to_rows(
    pointer, sums, first, n_rows, row_stride, COLUMNS: gl.constexpr, IN_PARTS: gl.constexpr
):
    """Store a sum to global memory without TMA, see `registers.store_rows`."""
    store_rows(pointer, sums[0], first, n_rows, row_stride, COLUMNS)
    if IN_PARTS:
        LOW: gl.constexpr = sums[0].shape[1]
        store_rows(pointer + LOW, sums[1], first, n_rows, row_stride, COLUMNS - LOW)


@gluon.jit
def store_to_shared(buffer, sums, IN_PARTS: gl.constexpr):
    """Store a sum to shared memory (64, TILE), in the dtype of `buffer`, for TMA to copy it."""
    dtype: gl.constexpr = buffer.dtype
    if IN_PARTS:
        LOW: gl.constexpr = sums[0].shape[1]
        HIGH: gl.constexpr = sums[1].shape[1]
        buffer.slice(0, LOW, 1).store(sums[0].to(dtype))
        buffer.slice(LOW, HIGH, 1).store(sums[1].to(dtype))
    else:
        buffer.store(sums[0].to(dtype))
