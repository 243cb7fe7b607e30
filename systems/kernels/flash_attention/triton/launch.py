"""Launch the forward and backward passes of FlashAttention-2 in Triton.

Number of kernel launches:
    forward   1 launch. 1 more to combine partial outputs if the keys are split into ranges.
    backward  3 launches: one for delta, one for dK and dV, and one for dQ. 1 more if dK and dV have
              separate launches. 1 more to add partial gradients if the inner loop of dkdv_kernel is
              split into ranges (2 if k and v have other head dimensions), and 1 more if that of
              dq_kernel is. torch adds a gradient of the log-sum-exp.
    fp16x3    3 more in each pass to split the float32 inputs into float16 halves, if the inputs
              have the same sizes and strides. Otherwise, and for packed sequences, 1 more, and 2
              more for each input.

The results do not depend on the order in which programs run. Equal inputs therefore give bitwise
equal outputs and gradients.

On a CPU, the kernels run in Triton's interpreter if the environment variable TRITON_INTERPRET=1 is
set.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from systems.kernels.flash_attention.arguments import check_kernel_inputs
from systems.kernels.flash_attention.call import MAX_PLANS, PLAIN, Call, Packing, Shapes, signature
from systems.kernels.flash_attention.triton.choose_tiles import tuned_tiles
from systems.kernels.flash_attention.triton.layout import empty_like
from systems.kernels.flash_attention.triton.plans import BackwardPlan, ForwardPlan
from systems.kernels.flash_attention.triton.tile_table import Configuration, configuration


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: Call = PLAIN,
    *,
    tiles: Configuration | None = None,
    n_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute softmax(q k^T * scale) v and its log-sum-exp without materializing the scores.

    Args:
        q: (..., n_queries, head_dim), float32, bfloat16 or float16, with head_dim from 1 to 256.
            Any strides, but q, k or v is copied if the kernels do not support its strides (see
            `layout.layout`).
        k: (..., n_keys, head_dim), with the dtype, device and leading dimensions of q. The last
            leading dimension (heads) may be smaller, if it divides that of q. Heads of k are then
            shared: head h of q has the head h // (heads of q / heads of k) of k and v.
        v: (..., n_keys, value_dim), with the leading dimensions of k, and value_dim from 1 to 256.
        call: options. Packed tensors are (heads, rows of all sequences, head_dim). Its precision is
            described below.
        tiles: None for those of `choose_tiles.tuned_tiles`.
        n_splits: ranges into which the keys are split, with one program for each; None for the
            result of `work_splits.default_splits`.

    Returns:
        out: (..., n_queries, value_dim), of q's dtype, with the strides of `layout.output_strides`.
            Zero for a query that sees no key.
        lse: natural-log log-sum-exp of the scaled scores, float32 (..., n_queries), contiguous;
            -inf for such a query.

    Raises:
        ValueError: if the inputs are invalid; the message lists all errors.
        RuntimeError: if the tensors are not on a GPU and Triton's interpreter is not enabled.

    With precision "fp16x3", each float32 number is split into two float16 halves, and each matmul
    consists of three float16 matmuls. The results are as accurate as those of float32 matmuls
    (measured up to 65,536 tokens). During the pass, the halves take 4 bytes per input element. A
    value below 2^-16 times the largest finite magnitude of its head is less precise: it loses one
    bit for each further factor of two.

    With precision "tf32", each matmul is one TF32 matmul. TF32 numbers have 11-bit significands,
    and the errors are near 1e-3.

    With all dtypes, out and lse of queries that do not see a key do not depend on k there, also if
    it is not finite. A value that is not finite in v, or in backward in k, also reaches queries
    from which the mask hides it, because 0 * NaN is NaN: those whose block shares a tile of keys
    with it. With `naive`, these are all queries of the head. In 16 bits, dK of a key can also be
    NaN because of q or dO of a query that does not see it.
    """
    if call.scale is not None and call.scale < 0:
        # The kernels use max(scale * s) = scale * max(s), which needs a scale of at least 0.
        q, call = negated(q), call._replace(scale=-call.scale)
    plan = _forward_plan(*signature(q, k, v), call.for_plan(), tiles, n_splits=n_splits)
    return plan(q, k, v, _packing(call))


def flash_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    call: Call = PLAIN,
    *,
    tiles: Configuration | None = None,
    n_splits_dkdv: int | None = None,
    n_splits_dq: int | None = None,
    needs_dq: bool = True,
    needs_dkdv: bool = True,
    dlse: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute the gradients of attention with respect to q, k and v.

    The other arguments are those of `flash_forward`, and out and lse its results; lse must be
    contiguous.

    Args:
        dout: with out's shape and dtype. It is copied if the kernels do not support its strides,
            for example the strides 0 of the gradient of `out.sum()`.
        n_splits_dkdv: ranges of queries for dK and dV, and n_splits_dq of keys for dQ; None for the
            result of `work_splits.default_splits`.
        dlse: gradient of lse, float32 with lse's shape; None if it is zero.

    Returns:
        dq, dk, dv: with the shapes and dtype of q, k and v; None for gradients that are not needed.

    Raises:
        ValueError, RuntimeError: as `flash_forward`.
    """
    if call.scale is not None and call.scale < 0:
        dq, dk, dv = flash_backward(
            negated(q), k, v, out, lse, dout, call._replace(scale=-call.scale), tiles=tiles,
            n_splits_dkdv=n_splits_dkdv, n_splits_dq=n_splits_dq, needs_dq=needs_dq,
            needs_dkdv=needs_dkdv, dlse=dlse,
        )  # fmt: skip
        return None if dq is None else dq.neg_(), dk, dv
    plan = _backward_plan(
        *signature(q, k, v), call.for_plan(), tiles, out_strides=out.stride(),
        dout_strides=dout.stride(), n_splits_dkdv=n_splits_dkdv, n_splits_dq=n_splits_dq,
        needs_dq=needs_dq, needs_dkdv=needs_dkdv,
    )  # fmt: skip
    return plan(q, k, v, out, lse, dout, _packing(call), dlse)


def _packing(call: Call) -> Packing | None:
    return call.packing if isinstance(call.packing, Packing) else None


def negated(q: Tensor) -> Tensor:
    """Return -q, with the strides that the attention output for q has.

    -q with scale -s gives the same scores as q with scale s, and the kernels need a scale of at
    least 0.
    """
    return torch.neg(q.detach(), out=empty_like(q))


@functools.lru_cache(maxsize=MAX_PLANS)
def _forward_plan(
    shapes: Any, strides: Any, dtypes: Any, devices: Any, call: Call,
    tiles: Configuration | None, **options: Any,
) -> ForwardPlan:  # fmt: skip
    check_kernel_inputs(shapes, dtypes, devices, call.precision)
    tiles = tiles or _tuned_tiles(shapes, dtypes[0], devices[0], call)
    return ForwardPlan(shapes, strides, dtypes, devices, call, tiles, **options)


@functools.lru_cache(maxsize=MAX_PLANS)
def _backward_plan(
    shapes: Any, strides: Any, dtypes: Any, devices: Any, call: Call,
    tiles: Configuration | None, **options: Any,
) -> BackwardPlan:  # fmt: skip
    check_kernel_inputs(shapes, dtypes, devices, call.precision)
    tiles = tiles or _tuned_tiles(shapes, dtypes[0], devices[0], call)
    return BackwardPlan(shapes, strides, dtypes, devices, call, tiles, **options)


def _tuned_tiles(
    shapes: Shapes, dtype: torch.dtype, device: torch.device, call: Call
) -> Configuration:
    *leading, n_queries, head_dim = shapes[0]
    widest = max(head_dim, shapes[2][-1])
    if call.softcap is not None:  # the search measures kernels without a softcap
        return configuration(widest, dtype, call.precision, softcap=True)
    n_heads, n_keys = math.prod(leading), shapes[1][-2]
    if call.packing is not None:  # as many sequences of the largest length as there is room for
        n_heads *= max(1, n_queries // max(1, call.packing.max_queries))
        n_queries, n_keys = call.packing.max_queries, call.packing.max_keys
    return tuned_tiles(
        widest, dtype, call.precision, call.is_causal, n_queries, n_keys, n_heads, device
    )
