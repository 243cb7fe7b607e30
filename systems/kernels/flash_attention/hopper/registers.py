"""Operations on the result of a WGMMA in registers, written so that ptxas compiles them well.

The result of a WGMMA is float32 (64, n). A thread holds values of two rows. In each of these rows,
it holds two adjacent values of every eight.
"""

# Kernel arguments have Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def row_maximum(s, layout: gl.constexpr):
    """Return the maximum of each row.

    The maxima of groups of values are computed first. This avoids one long chain of dependent
    instructions.
    """
    rows: gl.constexpr = s.shape[0]
    s = gl.max(s.reshape([rows, s.shape[1] // 32, 32]), 1)
    s = gl.max(s.reshape([rows, 4, 8]), 1)
    return gl.convert_layout(gl.max(s, 1), layout, assert_trivial=True)


@gluon.jit
def column_sums(p):
    """Return partial sums of each row, (rows, 8). Sum j adds columns j, j + 8, j + 16 and so on.

    Each thread adds only its own values, so no data is exchanged between threads. The partial sums
    of several tiles can be added. Then the threads of a row exchange data only once, at the end.
    """
    return gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 8]), 1)


@gluon.jit
def scale_rows(x, factor):
    """Return x[i, j] * factor[i]. Each thread must already hold the factors of its rows of x."""
    layout: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    return x * gl.convert_layout(factor, layout, assert_trivial=True)[:, None]


@gluon.jit
def pack(p, dtype: gl.constexpr):
    """Round float32 (rows, n) to dtype, and pack adjacent pairs into int32 (rows, n / 2)."""
    low, high = gl.split(p.reshape([p.shape[0], p.shape[1] // 2, 2]))
    pair: gl.constexpr = "cvt.rn.bf16x2.f32" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32"
    return gl.inline_asm_elementwise(
        pair + " $0, $2, $1;", "=r,r,r", [low, high], gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpack(packed, dtype: gl.constexpr, layout: gl.constexpr):
    """Convert a result of `pack` to (rows, n) of dtype in `layout`. Compiles to no instructions."""
    low = packed.to(gl.int16).to(dtype, bitcast=True)
    high = (packed >> 16).to(gl.int16).to(dtype, bitcast=True)
    p = gl.join(low, high).reshape([packed.shape[0], packed.shape[1] * 2])
    return gl.convert_layout(p, layout, assert_trivial=True)
