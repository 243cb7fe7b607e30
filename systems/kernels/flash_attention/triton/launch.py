"""Launch the forward and backward passes of FlashAttention-2 in Triton.

Launches of a pass:
    forward   1, and 1 that combines partial outputs if the keys are split into ranges
    backward  3 (delta; dK and dV; dQ), or 4 if dK and dV have separate launches; and 1 that adds
              partial gradients for each of dkdv_kernel and dq_kernel that is split
    float32   3 more, which split the inputs into float16 halves, if all have the same layout

No sum depends on the order in which programs run, so equal inputs give bitwise equal results, also
in backward. The first call with a `signature` makes a launch plan (see `plans`), which is cached.

On a CPU the kernels run in Triton's interpreter if TRITON_INTERPRET=1 is set.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from systems.kernels.flash_attention.layout import empty_like
from systems.kernels.flash_attention.triton.choose_tiles import tuned_tiles
from systems.kernels.flash_attention.triton.plans import BackwardPlan, ForwardPlan
from systems.kernels.flash_attention.triton.tile_table import Configuration
from systems.kernels.flash_attention.validation import (
    MAX_PLANS,
    Shapes,
    check_kernel_inputs,
    signature,
)


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    precision: str = "fp16x3",
    tiles: Configuration | None = None,
    n_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute softmax(q k^T * scale) v and its log-sum-exp without materializing the scores.

    Args:
        q: (..., n_queries, head_dim), float32, bfloat16 or float16, head_dim 1 to 128. Any strides,
            but q, k or v is copied if the kernels cannot address it (see `layout.layout`).
        k, v: (..., n_keys, head_dim), with q's dtype, device and leading dimensions.
        is_causal: query i sees keys 0 to i (aligned upper left, as in torch).
        scale: multiplies the scores; 1/sqrt(head_dim) by default.
        precision: of the matmuls of float32 inputs.
            "fp16x3": three float16 matmuls, as accurate as float32 (measured up to 65,536 tokens).
            Allocates 4 bytes per input element for the time of the pass. Magnitudes below 2^-16 of
            the largest in their head lose one bit per power of two. A value that is not finite
            turns its whole head into NaN.
            "tf32": one TF32 matmul, with 11-bit significands and errors near 1e-3.
        tiles: tile sizes; those of `choose_tiles.tuned_tiles` by default.
        n_splits: number of ranges into which the keys are split, with one program each;
            `work_splits.default_splits` by default.

    Returns:
        out: (..., n_queries, head_dim), of q's dtype, with q's strides if q is dense; zeros for a
            query that sees no key.
        lse: float32 (..., n_queries), contiguous: natural-log log-sum-exp of the scaled scores;
            -inf for a query that sees no key.

    Raises:
        ValueError: if the inputs are invalid; the message lists all errors.
        RuntimeError: if the tensors are not on a GPU and Triton's interpreter is not enabled.
    """
    if scale is not None and scale < 0:
        # The kernels use max(scale * s) = scale * max(s), which needs a scale of at least 0.
        q, scale = negated(q), -scale
    plan = _forward_plan(*signature(q, k, v), is_causal, scale, precision, tiles, n_splits)
    return plan(q, k, v)


def flash_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    *,
    precision: str = "fp16x3",
    tiles: Configuration | None = None,
    n_splits_dkdv: int | None = None,
    n_splits_dq: int | None = None,
    needs_dq: bool = True,
    needs_dkdv: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of `flash_forward` with respect to q, k and v.

    Args:
        q, k, v, is_causal, scale, precision, tiles: as given to `flash_forward`.
        out, lse: as returned by `flash_forward`; lse must be contiguous.
        dout: gradient of out, of out's shape and dtype. Any strides, but it is copied if the
            kernels cannot address it, such as the expanded gradient of a sum.
        n_splits_dkdv: number of ranges into which the queries are split to compute dK and dV;
            `work_splits.default_splits` by default.
        n_splits_dq: number of ranges into which the keys are split to compute dQ; likewise.
        needs_dq, needs_dkdv: compute dq; compute dk and dv.

    Returns:
        dq, dk, dv: of the shapes and dtype of q, k and v; None for gradients that are not needed.
    """
    if scale is not None and scale < 0:
        dq, dk, dv = flash_backward(
            negated(q), k, v, out, lse, dout, is_causal, -scale, precision=precision, tiles=tiles,
            n_splits_dkdv=n_splits_dkdv, n_splits_dq=n_splits_dq, needs_dq=needs_dq,
            needs_dkdv=needs_dkdv,
        )  # fmt: skip
        return None if dq is None else dq.neg_(), dk, dv
    plan = _backward_plan(
        *signature(q, k, v), is_causal, scale, precision, tiles,
        out_strides=out.stride(), dout_strides=dout.stride(), n_splits_dkdv=n_splits_dkdv,
        n_splits_dq=n_splits_dq, needs_dq=needs_dq, needs_dkdv=needs_dkdv,
    )  # fmt: skip
    return plan(q, k, v, out, lse, dout)


def negated(q: Tensor) -> Tensor:
    """Return -q with the strides of an output for q, so that out and dq keep their strides."""
    return torch.neg(q.detach(), out=empty_like(q))


@functools.lru_cache(maxsize=MAX_PLANS)
def _forward_plan(
    shapes: Any, strides: Any, dtypes: Any, devices: Any, is_causal: bool,
    scale: float | None, precision: str, tiles: Configuration | None, n_splits: int | None,
) -> ForwardPlan:  # fmt: skip
    check_kernel_inputs(shapes, strides, dtypes, devices, precision)
    tiles = tiles or _tuned_tiles(shapes, dtypes[0], devices[0], is_causal, precision)
    return ForwardPlan(
        shapes, strides, dtypes, devices, is_causal, scale, precision, tiles, n_splits=n_splits
    )


@functools.lru_cache(maxsize=MAX_PLANS)
def _backward_plan(
    shapes: Any, strides: Any, dtypes: Any, devices: Any, is_causal: bool,
    scale: float | None, precision: str, tiles: Configuration | None, **options: Any,
) -> BackwardPlan:  # fmt: skip
    check_kernel_inputs(shapes, strides, dtypes, devices, precision)
    tiles = tiles or _tuned_tiles(shapes, dtypes[0], devices[0], is_causal, precision)
    return BackwardPlan(
        shapes, strides, dtypes, devices, is_causal, scale, precision, tiles, **options
    )


def _tuned_tiles(
    shapes: Shapes, dtype: torch.dtype, device: torch.device, is_causal: bool, precision: str
) -> Configuration:
    *leading, n_queries, head_dim = shapes[0]
    return tuned_tiles(
        head_dim, dtype, precision, is_causal, n_queries, shapes[1][-2], math.prod(leading), device
    )
