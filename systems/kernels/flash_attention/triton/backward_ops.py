"""Backward pass of FlashAttention-2 in Triton (Dao 2023, algorithm 2).

Q, K and V are the queries, keys and values, and O is the attention output. S = Q K^T are the
scores, P is the softmax of the scaled scores, and L is their log-sum-exp. For a tensor X, dX is the
gradient of X.

    delta_kernel   D = rowsum(dO * O)
    dkdv_kernel    one program per block of keys, which loops over the queries that see it:
                       P^T = exp(scale K Q^T - L)      dV += P^T dO
                       dS^T = P^T * (V dO^T - D)       dK += dS^T Q
                   If the registers cannot hold dK and dV together, each has a separate launch.
    dq_kernel      one program per block of queries, which loops over the keys that they see:
                       P = exp(scale Q K^T - L)    dS = P * (dO V^T - D)    dQ += dS K

At the end, dK and dQ are multiplied by the scale. With a softcap c, the scores are S' =
c tanh(S / c) instead of S, and dS is multiplied by 1 - (S' / c)^2.

With grouped heads, several heads of queries have the same head of keys. A program of dkdv_kernel
then loops over the queries of all of them.

In algorithm 2, every block of keys adds to dQ. This needs atomic additions in an order that is not
fixed, so the rounding of dQ is not reproducible. Here a separate kernel computes dQ. No two
programs add to the same gradient, and equal inputs give bitwise equal gradients. The disadvantage
is that both kernels compute S and dP = dO V^T. A tile therefore needs 7 matmuls instead of 5.

dkdv_kernel computes the transposed S^T and dP^T. Their products can then be used in the next matmul
without a transposition, and they stay in registers. This also avoids a bug of Triton versions
before 3.8 on Hopper GPUs (triton-lang/triton #9433).

If the queries of dkdv_kernel or the keys of dq_kernel are split into ranges (see `work_splits`),
programs write partial gradients in float32, and `combine_kernel.sum_kernel` adds them.

This module has delta_kernel and the functions that both other kernels use.

Arguments of the functions that process one tile:

    *_half         distance from the high to the low float16 half of a tensor in memory, in
                   elements; used only with FP16X3
    lower, upper   bounds of the mask (see `mask_ops`)
    dp_unit        factor that undoes the scaling of the inputs in dP (see `units`)
    scale_log2e    scale of the scores times log2(e); with FP16X3, also times the units of q and k
                   (see `tile_ops.unit`)
    cap_log2e      softcap times log2(e); read only with SOFTCAP
    SOFTCAP        see `base_plan.softcap_form`
    MASKED         whether the tile needs a mask, because it is at a bound of the mask or incomplete
"""

# Kernel arguments have Triton's own types, which mypy does not know.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl

from systems.kernels.flash_attention.triton.mask_ops import tanh
from systems.kernels.flash_attention.triton.tile_ops import (
    TOP_INVERSE,
    add_product,
    as_operand,
    head_base,
    load_tile,
    scaled,
    unit,
)

# Arguments of dkdv_kernel and dq_kernel for whose values the compiler makes no special versions
SIZES = [
    "n_programs", "n_heads", "total_queries", "total_keys", "n_splits", "group", "left", "right",
]  # fmt: skip


@triton.jit(do_not_specialize=["n_heads", "n_queries"])
def delta_kernel(
    out, dout, delta,
    out_batch, out_head, out_row, dout_batch, dout_head, dout_row, n_heads, n_queries,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute delta = rowsum(dO * O), D in algorithm 2 of FlashAttention-2 (line 4).

    Grid: (number of blocks of ROWS queries * batch * heads,).

    Args:
        out, dout: (batch, heads, n_queries, HEAD_DIM). Strides are in elements.
        delta: float32 (batch, heads, n_queries), contiguous, output.
        COLUMNS: HEAD_DIM rounded up to a power of two, at least 16.
    """
    n_blocks = tl.cdiv(n_queries, ROWS)
    head = tl.program_id(0) // n_blocks
    first = tl.program_id(0) % n_blocks * ROWS
    out = head_base(out, head, n_heads, out_batch, out_head)
    dout = head_base(dout, head, n_heads, dout_batch, dout_head)
    o = load_tile(out, first, n_queries, out_row, HEAD_DIM, ROWS, COLUMNS, True)
    do = load_tile(dout, first, n_queries, dout_row, HEAD_DIM, ROWS, COLUMNS, True)
    total = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    row = first + tl.arange(0, ROWS)
    tl.store(delta + head.to(tl.int64) * n_queries + row, total, mask=row < n_queries)


@triton.jit
def units(peaks, head, kv_head, n_programs, FP16X3: tl.constexpr):
    """Return five factors that undo the scaling of the inputs in S, dP, dQ, dK and dV.

    With FP16X3, each head of q, k, v and dO is divided by a power of two, its unit. A matrix
    product must be multiplied by the units of its operands. The factor for dV also undoes the
    multiplication of the softmax P by 2^14 (TOP_POWER). Without FP16X3, all factors are 1. `head`
    is that of q and dO, and `kv_head` that of k and v. See `tile_ops.peak_of` for the others.
    """
    s, dp, dq, dk, dv = 1.0, 1.0, 1.0, 1.0, 1.0
    if FP16X3:
        q, k = unit(peaks, 0, head, n_programs), unit(peaks, 1, kv_head, n_programs)
        v, do = unit(peaks, 2, kv_head, n_programs), unit(peaks, 3, head, n_programs)
        s, dp, dq, dk, dv = q * k, v * do, k, q, do * TOP_INVERSE
    return s, dp, dq, dk, dv


@triton.jit
def capped(
    scores, scale_log2e, cap_log2e,
    SOFTCAP: tl.constexpr, DTYPE: tl.constexpr, FP16X3: tl.constexpr,
):  # fmt: skip
    """Return the capped scores in base 2 and their derivative, for scores before scaling."""
    is_precise: tl.constexpr = tl.float32 == DTYPE or FP16X3 or SOFTCAP == 2
    ratio = tanh(scores * (scale_log2e / cap_log2e), is_precise)
    return cap_log2e * ratio, 1.0 - ratio * ratio


@triton.jit
def add_scaled(
    total, peak, ds, other, factor,
    DTYPE: tl.constexpr, FP16X3: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return total + factor dS @ other in float32, and the new peaks of the rows of dS.

    With FP16X3, dS is converted to float16 halves. Its magnitudes have no known bound, so each row
    is first divided by a power of two, and so is the same row of the sum (see `tile_ops.scaled`).
    Without FP16X3, `ds`, float32, is rounded to DTYPE, and `peak` is returned unchanged. `other` is
    an operand of `tile_ops.load_operand`, and `factor` is that of `tile_ops.add_product`.
    """
    if FP16X3:
        ds, peak, correction = scaled(ds, peak)
        total = total * correction[:, None]
    ds = as_operand(ds, DTYPE, FP16X3)
    return add_product(total, ds, other, factor, FP16X3, PRECISION), peak
