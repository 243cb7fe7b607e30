"""The output of 64 queries in the registers of a consumer of the Hopper forward kernel.

The number of columns of a tensor in registers is a power of two. An output of 192 columns is
therefore a tuple of two tensors, with 128 and 64 columns. Otherwise, the output is a tuple of one
tensor. In this module, IN_PARTS is True for two tensors.
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

from systems.kernels.flash_attention.hopper.registers import scale_rows, store_rows, unpack

ROWS = gl.constexpr(64)
LOW = gl.constexpr(128)  # number of columns of the first part of an output in parts
HIGH = gl.constexpr(64)


@gluon.jit
def zero_output(COLUMNS: gl.constexpr, IN_PARTS: gl.constexpr):
    """Return zeros, float32 (64, COLUMNS), or (64, 192) if IN_PARTS is True."""
    if IN_PARTS:
        low: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LOW, 16])
        high: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HIGH, 16])
        o = (gl.zeros([ROWS, LOW], gl.float32, low), gl.zeros([ROWS, HIGH], gl.float32, high))
    else:
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
        o = (gl.zeros([ROWS, COLUMNS], gl.float32, layout),)
    return o


@gluon.jit
def operands(packed, dtype: gl.constexpr, COLUMNS: gl.constexpr, IN_PARTS: gl.constexpr):
    """Return P as left operands of the WGMMAs of the output, a tuple with one for each tensor.

    Args:
        packed, dtype: see `registers.unpack`.
        COLUMNS, IN_PARTS: see `zero_output`.
    """
    if IN_PARTS:
        low: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LOW, 16])
        high: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HIGH, 16])
        p = (
            unpack(packed, dtype, gl.DotOperandLayout(0, low, 2)),
            unpack(packed, dtype, gl.DotOperandLayout(0, high, 2)),
        )
    else:
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
        p = (unpack(packed, dtype, gl.DotOperandLayout(0, layout, 2)),)
    return p


@gluon.jit
def add_values(p, v, o, IN_PARTS: gl.constexpr):
    """Issue the asynchronous WGMMAs that add P v to the output.

    Args:
        p: result of `operands`.
        v: tile of values in shared memory, (keys, COLUMNS).
        o: output so far.

    Returns:
        The new output, for `wait_for_output`.
    """
    if IN_PARTS:
        done = (
            warpgroup_mma(p[0], v.slice(0, LOW, 1), o[0], is_async=True),
            warpgroup_mma(p[1], v.slice(LOW, HIGH, 1), o[1], is_async=True),
        )
    else:
        done = (warpgroup_mma(p[0], v, o[0], is_async=True),)
    return done


@gluon.jit
def wait_for_output(o, p, IN_PARTS: gl.constexpr):
    """Wait for all WGMMAs, and return the output.

    Args:
        o: result of `add_values`.
        p: operands of these WGMMAs. Their registers must not change before the WGMMAs are complete.
    """
    if IN_PARTS:
        low, high, _, _ = warpgroup_mma_wait(0, deps=[o[0], o[1], p[0], p[1]])
        done = (low, high)
    else:
        whole, _ = warpgroup_mma_wait(0, deps=[o[0], p[0]])
        done = (whole,)
    return done


@gluon.jit
def scale_output(o, factor, IN_PARTS: gl.constexpr):
    """Multiply the rows of the output by factors, see `registers.scale_rows`."""
    if IN_PARTS:
        scaled = (scale_rows(o[0], factor), scale_rows(o[1], factor))
    else:
        scaled = (scale_rows(o[0], factor),)
    return scaled


@gluon.jit
def store_output(
    pointer, o, first, n_rows, row_stride, COLUMNS: gl.constexpr, IN_PARTS: gl.constexpr
):
    """Store the output to global memory without TMA, see `registers.store_rows`.

    Args:
        COLUMNS: number of columns of the tensor in global memory.
    """
    store_rows(pointer, o[0], first, n_rows, row_stride, COLUMNS)
    if IN_PARTS:
        store_rows(pointer + LOW, o[1], first, n_rows, row_stride, COLUMNS - LOW)
