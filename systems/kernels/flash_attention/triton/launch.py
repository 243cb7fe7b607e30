"""Launch FlashAttention-2 in Triton: `flash_forward` and `flash_backward` for any tensors.

The forward pass is one launch, or two if it is split over keys. The backward pass is three
launches, four if dK and dV have one each, plus one for each of its two passes that is split. No sum
depends on the order in which programs run: equal inputs give equal bits, in backward too. float32
tensors are first split into float16 halves, in three more launches if all have the same layout.
The first call with a `signature` makes a plan (`plans`), which is cached.

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
    """Compute softmax(q k^T * scale) v and its log-sum-exp without the score matrix.

    Args:
        q: (..., n_queries, head_dim), float32, bfloat16 or float16, head_dim 1 to 128. Any strides;
            a copy is made if the last is not 1.
        k, v: (..., n_keys, head_dim), of q's dtype, device and leading dimensions.
        is_causal: query i sees keys 0 to i (aligned upper left, as in torch).
        scale: multiplies the scores; 1/sqrt(head_dim) by default.
        precision: of float32 matmuls. "fp16x3" is as accurate as float32: three float16 matmuls,
            measured up to 65,536 tokens, and 4 bytes of memory per element while it runs.
            Magnitudes below 2^-16 of the largest in their head lose a bit with each power of two,
            and a value that is not finite makes all of its head NaN. "tf32" has 11 bits and errors
            near 1e-3.
        tiles: by default those of `choose_tiles.tuned_tiles`.
        n_splits: number of ranges of keys, one program each; `work_splits.default_splits` by
            default.

    Returns:
        out: (..., n_queries, head_dim), of q's dtype and, if q is dense, layout; 0 for a query
            without a key.
        lse: float32 (..., n_queries), contiguous: natural-log log-sum-exp of the scaled scores;
            -inf for a query without a key.

    Raises:
        ValueError: names everything that is wrong.
        RuntimeError: there is no GPU and no interpreter.
    """
    if scale is not None and scale < 0:
        # The kernels move the scale out of a maximum, so it must not be negative.
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
        out, lse: as it returned them; lse contiguous.
        dout: of out's shape and dtype, any strides; a copy is made if the last is not 1, as in the
            expanded gradient of a sum.
        n_splits_dkdv, n_splits_dq: numbers of ranges of queries and of keys, one program each;
            `work_splits.default_splits` by default.
        needs_dq, needs_dkdv: skip the gradients for which this is False.

    Returns:
        dq, dk, dv: of the shapes and dtype of q, k and v, or None.
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
    """Return -q with the strides of an output for q, so that outputs keep their layout."""
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
