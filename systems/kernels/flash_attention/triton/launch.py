"""FlashAttention-2 in Triton, launched: `flash_forward` and `flash_backward` of any tensors.

Forward is one launch, two where it is split over keys; backward is three, four where dK and dV are
apart, and one more for each of its two passes that is split. Nothing is added in an order that
could change: equal inputs give equal bits, backward too. Tensors in float32 are cut into parts
first, in three launches more where all are laid out alike. What a call needs besides the tensors is
kept from the first call with such tensors on (`plans`).

On a CPU the kernels run in Triton's interpreter if TRITON_INTERPRET=1 was in the environment.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from systems.kernels.flash_attention.configurations import Configuration
from systems.kernels.flash_attention.layout import empty_like
from systems.kernels.flash_attention.triton.plans import PLANS, Backward, Forward, described


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
    """softmax(q k^T * scale) v and its log-sum-exp, without the score matrix.

    Args:
        q: (..., n_queries, head_dim), float32, bfloat16 or float16, head_dim 1 to 128. Any strides;
            where the last is not 1 a copy is made.
        k, v: (..., n_keys, head_dim), of q's dtype, device and leading dimensions.
        is_causal: query i sees keys 0 to i (aligned upper left, as in torch).
        scale: multiplies the scores; 1/sqrt(head_dim) by default.
        precision: of products of float32: "fp16x3", as exact as float32 (three products of float16,
            measured to 65,536 tokens, and 4 bytes of memory an element while it runs; of magnitudes
            below 2^-16 of the largest of their head a bit is lost with each power of two, and where
            one is not finite all of its head becomes NaN), or "tf32", whose 11 bits give errors
            near 1e-3.
        tiles: by default those of `configurations.TABLE`.
        n_splits: ranges of keys, each of them a program's; by default `configurations.splits`.

    Returns:
        out: (..., n_queries, head_dim), of q's dtype and, where it is dense, layout; 0 for a query
            without a key.
        lse: float32 (..., n_queries), contiguous: natural-log log-sum-exp of the scaled scores;
            -inf for a query without a key.

    Raises:
        ValueError: names all that does not fit.
        RuntimeError: no GPU, and no interpreter.
    """
    if scale is not None and scale < 0:
        # The kernels take the scale out of a maximum, so it is not negative.
        q, scale = negated(q), -scale
    plan = _forward(*described(q, k, v), is_causal, scale, precision, tiles, n_splits)
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
    """Gradients of `flash_forward` by q, k and v, from what it returned.

    Args:
        q, k, v, is_causal, scale, precision, tiles: as they were given to `flash_forward`.
        out, lse: as it returned them; lse contiguous.
        dout: of out's shape and dtype, any strides; a copy is made where the last is not 1, as of
            the expanded gradient of a sum.
        n_splits_dkdv: ranges of queries, n_splits_dq: ranges of keys, each of them a program's; by
            default `configurations.splits`.
        needs_dq, needs_dkdv: what is False is not computed.

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
    plan = _backward(
        *described(q, k, v), is_causal, scale, precision, tiles,
        out_strides=out.stride(), dout_strides=dout.stride(), n_splits_dkdv=n_splits_dkdv,
        n_splits_dq=n_splits_dq, needs_dq=needs_dq, needs_dkdv=needs_dkdv,
    )  # fmt: skip
    return plan(q, k, v, out, lse, dout)


def negated(q: Tensor) -> Tensor:
    """-q with the strides of an output like q: what is like it has those of what is like q."""
    return torch.neg(q.detach(), out=empty_like(q))


@functools.lru_cache(maxsize=PLANS)
def _forward(
    shapes: Any, strides: Any, dtypes: Any, devices: Any, is_causal: bool,
    scale: float | None, precision: str, tiles: Configuration | None, n_splits: int | None,
) -> Forward:  # fmt: skip
    return Forward(
        shapes, strides, dtypes, devices, is_causal, scale, precision, tiles, n_splits=n_splits
    )


@functools.lru_cache(maxsize=PLANS)
def _backward(*inputs: Any, **options: Any) -> Backward:
    return Backward(*inputs, **options)
