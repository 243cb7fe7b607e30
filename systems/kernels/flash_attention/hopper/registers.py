"""Operations on the result of a WGMMA in registers, written so that ptxas makes fast code of them.

WGMMA is the asynchronous matmul of a Hopper warpgroup. Its result is a float32 matrix with 64 rows.
Each thread holds values of two rows. Of every eight adjacent values of such a row, the thread holds
two adjacent ones.
"""

# Kernel arguments have Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def row_maximum(s, layout: gl.constexpr):
    """Return the maximum of each row of s.

    The function first computes the maxima of groups of values. This avoids one long chain of
    dependent instructions. s is (rows, n) in registers, n a multiple of 32. `layout` is that of the
    result (rows,).
    """
    rows: gl.constexpr = s.shape[0]
    s = gl.max(s.reshape([rows, s.shape[1] // 32, 32]), 1)
    s = gl.max(s.reshape([rows, 4, 8]), 1)
    return gl.convert_layout(gl.max(s, 1), layout, assert_trivial=True)


@gluon.jit
def column_sums(p):
    """Return eight partial sums of each row of p.

    The result has the shape (rows, 8). Partial sum j adds the columns j, j + 8, j + 16 and so on.
    Each thread adds only values that it holds itself, so the threads exchange no data. The caller
    can add the partial sums of several tiles, and add the eight partial sums of a row only once, at
    the end.
    """
    return gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 8]), 1)


@gluon.jit
def scale_rows(x, factor):
    """Return the matrix with the elements x[i, j] * factor[i].

    Each thread must already hold the factors of the rows of which it holds values.
    """
    layout: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return x * gl.convert_layout(factor, layout, assert_trivial=True)[:, None]


@gluon.jit
def reciprocal(x):
    """Return 1 / x of float32 numbers of at least 2^-126, within one unit in the last place."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def pack(p, dtype: gl.constexpr):
    """Round float32 (rows, n) to 16 bits, and pack two adjacent values of a row into one int32.

    The value with the lower column is in the low 16 bits. `dtype` is bfloat16 or float16.
    """
    low, high = gl.split(p.reshape([p.shape[0], p.shape[1] // 2, 2]))
    pair: gl.constexpr = "cvt.rn.bf16x2.f32" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32"
    return gl.inline_asm_elementwise(
        pair + " $0, $2, $1;", "=r,r,r", [low, high], gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpack(packed, dtype: gl.constexpr):
    """Return the 16-bit values (rows, n) that `pack` has packed into int32, with the same dtype.

    They are in the registers of the argument of `pack`. This compiles to no instructions.
    """
    low = packed.to(gl.int16).to(dtype, bitcast=True)
    high = (packed >> 16).to(gl.int16).to(dtype, bitcast=True)
    return gl.join(low, high).reshape([packed.shape[0], packed.shape[1] * 2])


@gluon.jit
def in_elements(stride):
    """Return a stride in elements, int64, that is given in units of 8 elements.

    The compiler then knows that it is a multiple of 8, and `store_rows` can store several elements
    at a time.
    """
    return gl.to_tensor(stride).to(gl.int64) * 8


@gluon.jit
def store_rows(pointer, value, first, n_rows, row_stride, COLUMNS: gl.constexpr = 0):
    """Store a tile to global memory, except the rows that are past the end of the tensor.

    Args:
        pointer: address of row 0 of the tensor, whose rows are contiguous.
        row_stride: in elements. Unless the compiler knows that it is even (see `in_elements`),
            16-bit values are stored one by one.
        COLUMNS: columns of the tensor, or 0 if as many as of the tile. Further ones are not stored.
    """
    layout: gl.constexpr = value.type.layout
    row = gl.arange(0, value.shape[0], gl.SliceLayout(1, layout))
    column = gl.arange(0, value.shape[1], gl.SliceLayout(0, layout))
    pointers = pointer + (first + row).to(gl.int64)[:, None] * row_stride + column[None, :]
    mask = (first + row < n_rows)[:, None]
    if COLUMNS > 0 and value.shape[1] > COLUMNS:
        mask = mask & (column < COLUMNS)[None, :]
    gl.store(pointers, value.to(pointer.dtype.element_ty), mask=mask)
