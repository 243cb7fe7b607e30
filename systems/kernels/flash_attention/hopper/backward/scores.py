"""Scores and probabilities of a tile in the Hopper backward kernels, as (keys, queries)."""

# Kernel arguments have Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from systems.kernels.flash_attention.hopper.registers import reciprocal


@gluon.jit
def times(a, b, layout: gl.constexpr, COLUMNS: gl.constexpr):
    """Issue the asynchronous WGMMAs of a b^T, see `add_times`."""
    ROWS: gl.constexpr = a.shape[0]
    RESULT_COLUMNS: gl.constexpr = b.shape[0]
    zeros = gl.zeros([ROWS, RESULT_COLUMNS], gl.float32, layout)
    return add_times(a, b, zeros, COLUMNS, False)


@gluon.jit
def add_times(a, b, sum, COLUMNS: gl.constexpr, ADDS: gl.constexpr = True):
    """Issue the asynchronous WGMMAs of sum + a b^T, float32 (rows of a, rows of b).

    COLUMNS is all columns of the tiles a and b, or three quarters of them, which take two WGMMAs.
    The caller must wait for them before it uses the result. The tiles are in shared memory, or a in
    registers if COLUMNS is all. Without ADDS, `sum` is zeros, which then need no registers.
    """
    LOW: gl.constexpr = a.shape[1] // 2
    HIGH: gl.constexpr = a.shape[1] // 4
    if COLUMNS == LOW + HIGH:
        low = b.slice(0, LOW, 1).permute((1, 0))
        sum = warpgroup_mma(a.slice(0, LOW, 1), low, sum, use_acc=ADDS, is_async=True)
        high = b.slice(LOW, HIGH, 1).permute((1, 0))
        sum = warpgroup_mma(a.slice(LOW, HIGH, 1), high, sum, is_async=True)
    else:
        sum = warpgroup_mma(a, b.permute((1, 0)), sum, use_acc=ADDS, is_async=True)
    return sum


@gluon.jit
def probabilities(s, lse, problem, item, first_key, first_query, MASKED: gl.constexpr):
    """Return P^T of a tile, and P^T times the derivative of the capped by the scaled scores.

    Without a softcap, this derivative is 1. With a softcap, tanh(x) is 1 - 2 r with r = 1 / (1 +
    exp(2 x)), and its derivative is 4 (r - r^2). s is S^T, float32 (keys, queries), in registers.
    lse is in base 2.
    """
    if problem.SOFTCAP:
        r = reciprocal(1.0 + gl.exp2(s * problem.scale_log2e))
        p = gl.exp2(r * (-2.0 * problem.cap_log2e) + (problem.cap_log2e - lse)[None, :])
    else:
        p = gl.exp2(s * problem.scale_log2e - lse[None, :])
    if MASKED:
        p = hide(p, problem, item, first_key, first_query, 0)
    weighted = p
    if problem.SOFTCAP:
        weighted = p * (4.0 * (r - r * r))
    return p, weighted


@gluon.jit
def hide(p, problem, item, first_key, first_query, KEY_AXIS: gl.constexpr):
    """Set the probabilities of a tile that belong to hidden or missing keys to zero.

    A key is hidden from a query if the mask excludes it. A key is missing if the tile extends past
    the last key. Without packed sequences, its score is 0, so its probability would be exp2(-lse).
    This may be inf, and the matmul for dQ would then compute inf * 0 = NaN. KEY_AXIS is the
    dimension of p with one index per key, 0 or 1.
    """
    QUERY_AXIS: gl.constexpr = 1 - KEY_AXIS
    of_keys: gl.constexpr = gl.SliceLayout(QUERY_AXIS, p.type.layout)
    of_queries: gl.constexpr = gl.SliceLayout(KEY_AXIS, p.type.layout)
    keys = first_key + gl.arange(0, p.shape[KEY_AXIS], of_keys)
    visible = gl.expand_dims(keys < item.n_keys, QUERY_AXIS)
    keys = gl.expand_dims(keys, QUERY_AXIS)
    if problem.IS_CAUSAL or problem.BOUNDED:
        queries = first_query + gl.arange(0, p.shape[QUERY_AXIS], of_queries)
        queries = gl.expand_dims(queries, KEY_AXIS)
        visible = visible & (keys <= queries + item.upper)
    if problem.BOUNDED:
        visible = visible & (keys >= queries + item.lower)
    return gl.where(visible, p, 0.0)
