"""Attention functions that check their inputs and select an implementation.

Example:

    from systems.kernels.flash_attention import flash_attention

    out = flash_attention(q, k, v, is_causal=True)
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from systems.kernels.flash_attention.arguments import (
    ALIGNMENTS,
    LAYOUTS,
    PACKED,
    Options,
    make_call,
    make_packing,
    option_errors,
    packing_errors,
    require_tensors,
    scale_error,
    tensor_errors,
)
from systems.kernels.flash_attention.call import (
    MAX_PLANS,
    Call,
    autocast,
    is_traced,
    signature,
)
from systems.kernels.flash_attention.implementations import (
    ATTENTIONS,
    best_implementation,
    unsupported_reason,
)
from systems.kernels.flash_attention.triton.layout import four_dimensional

Window = tuple[int | None, int | None]
NO_WINDOW: Window = (None, None)


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    implementation: str = "auto",
    *,
    window: Window = NO_WINDOW,
    alignment: str = "upper_left",
    softcap: float | None = None,
    return_lse: bool = False,
    layout: str = "bhsd",
) -> Any:
    """Compute softmax(q k^T * scale) v, differentiable with respect to q, k and v.

    Under autocast, float32, bfloat16 and float16 inputs are cast to the autocast dtype. In this
    case, q, k and v may have different dtypes.

    Args:
        q: (..., heads, n_queries, head_dim), float32, bfloat16, float16 or float64, any strides.
        k: (..., heads, n_keys, head_dim), with the dtype and device of q. It may have fewer heads
            than q, if their number divides that of q (grouped-query and multi-query attention).
            Each head of k and v then belongs to as many consecutive heads of q.
        v: (..., heads, n_keys, value_dim), with the leading dimensions of k.
        is_causal: if True, a query sees only keys up to its position.
        scale: multiplies the scores; 1/sqrt(head_dim) by default.
        implementation:
            auto            the fastest one measured: flash_hopper or flash_triton for large inputs
                            on an H100 or H200, sdpa for others, and for features that sdpa lacks
                            the first of flash_hopper (if the inputs fill the GPU or can be split),
                            flash_triton and naive that supports them (see docs/attention.md)
            naive           attention with the full score matrix in memory, in the inputs' dtype;
                            with one of the features below, in float32 or float64
            flash_pytorch   FlashAttention-2 in plain torch, written for readers; computes in
                            float32, or in float64 for float64 inputs
            flash_triton    FlashAttention-2 in Triton, on a GPU; with TRITON_INTERPRET=1 also on a
                            CPU
            flash_hopper    FlashAttention-3 on an H100 or H200, for bfloat16 or float16 inputs,
                            a head_dim that is a multiple of 8 from 64 to 256, and a softcap up to
                            512
            flash_attn_4    the kernels of the package flash-attn-4, if it is installed
            flex            torch's FlexAttention, compiled
            sdpa            torch's scaled_dot_product_attention; torch selects the backend
            sdpa_flash, sdpa_cudnn, sdpa_efficient, sdpa_math
                            torch's scaled_dot_product_attention with the named backend only
        window: (left, right): a query sees the keys from `left` before to `right` after its
            position. None means no limit.
        alignment: "upper_left": query i has the position of key i, as in torch. "lower_right": the
            last query has the position of the last key, as in flash-attn. The alignment matters for
            a causal mask or a window if n_queries and n_keys differ.
        softcap: each scaled score s becomes softcap * tanh(s / softcap), before the mask; None for
            no softcap.
        layout: "bhsd" for tensors (..., heads, rows, head_dim), or "bshd" for tensors (..., rows,
            heads, head_dim), without a copy. The output has the same layout.

    Returns:
        out: of q's dtype (under autocast: after the cast), with the shape of q except for the last
            dimension, which is value_dim. It is zero for a query that sees no key.
        lse: only with return_lse: natural-log log-sum-exp of the scaled scores, float32 (float64
            for float64 inputs), (..., heads, n_queries) in both layouts. It is -inf for a query
            that sees no key. It is differentiable.

    Raises:
        ValueError: if arguments are invalid; the message lists all errors.
        RuntimeError: if the implementation does not support these inputs on this machine.
    """
    require_tensors(q, k, v)
    q, k, v = autocast(q, k, v)  # first, because the code below depends on the dtype
    options = Options(
        is_causal, scale, implementation, window, alignment, softcap, return_lse, layout
    )
    choice = _choose(q, k, v, options)
    if layout == LAYOUTS[0] and q.dim() == 4:
        return _attend(q, k, v, *choice)
    if layout == LAYOUTS[1]:
        q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    leading = q.shape[:-2]
    # torch's fused kernels support only four dimensions. For other numbers of dimensions, torch
    # materializes the score matrix.
    q, k, v = (four_dimensional(x) for x in (q, k, v))
    result = _attend(q, k, v, *choice)
    out, lse = result if return_lse else (result, None)
    out = out.reshape(*leading, *out.shape[-2:])
    if layout == LAYOUTS[1]:
        out = out.transpose(-3, -2)
    return out if lse is None else (out, lse.reshape(*leading, lse.shape[-1]))


def flash_attention_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    implementation: str = "auto",
    *,
    window: Window = NO_WINDOW,
    alignment: str = "upper_left",
    softcap: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Compute attention of sequences of different lengths without padding.

    The sequences are packed one after another along the rows of q, k and v. Each query sees only
    keys of its own sequence.

    Args:
        q: (rows of all sequences, heads, head_dim), as in flash-attn's varlen functions.
        k, v: (rows of all sequences, heads, head_dim or value_dim). They may have fewer heads than
            q (see `flash_attention`).
        cu_seqlens_q: int32 (n_sequences + 1,), on q's device: sequence s has the rows from
            cu_seqlens_q[s] to cu_seqlens_q[s + 1] - 1 of q. It begins with 0 and ends with the
            number of rows. Sequences may be empty.
        cu_seqlens_k: the same for k and v; cu_seqlens_q by default.
        max_seqlen_q, max_seqlen_k: length of the longest sequence, or any larger number. If one of
            them is None, it is computed and all boundaries are checked, which waits for the GPU
            (torch.compile breaks the graph there). With both, boundaries on a GPU are not checked,
            nor are these lengths.
            Rows past max_seqlen in a sequence, and rows outside of all sequences, are then
            undefined in the output and in the gradients. flash_hopper reads up to 127 rows behind
            a sequence and multiplies them by zero, so they must be finite.
        is_causal, scale, implementation, window, alignment, softcap, return_lse: as in
            `flash_attention`. Each sequence has its own alignment. The implementations that
            support packed sequences are auto, flash_hopper (head_dim 64, 128, 192 or 256),
            flash_triton, flash_attn_4 and naive.

    Returns:
        out: (rows of q, heads, value_dim).
        lse: only with return_lse: (heads, rows of q).

    Raises:
        ValueError, RuntimeError: as `flash_attention`.
    """
    require_tensors(q, k, v)
    q, k, v = autocast(q, k, v)
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    options = Options(
        is_causal, scale, implementation, window, alignment, softcap, return_lse, LAYOUTS[0]
    )
    errors = packing_errors(q.device, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    _raise_errors(q, k, v, options, PACKED, errors)
    if cu_seqlens_q is cu_seqlens_k:  # both alignments are the same, and flash-attn has only this
        options = options._replace(alignment=ALIGNMENTS[1])
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    packing = make_packing(
        q.shape[1], k.shape[1], cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    )
    call = make_call(options)._replace(packing=packing)
    if implementation == "auto":
        implementation = best_implementation(q, k, v, call)
    result = _attend(q, k, v, implementation, call)
    out, lse = result if return_lse else (result, None)
    # The kernels write rows before heads if q has them so; naive does not.
    out = out.transpose(0, 1).contiguous()
    return out if lse is None else (out, lse)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention as `torch.nn.functional.scaled_dot_product_attention` does.

    The arguments, the result and the errors are those of torch's function, to replace it:

        torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention

    `flash_attention(..., implementation="auto")` computes the result. torch's function itself is
    called for an attn_mask, for dropout, within transforms of torch.func, and for arguments that
    `flash_attention` does not accept, for example nested tensors and batch dimensions that
    broadcast. It warns the first time for each reason, except while torch.compile traces it.
    """
    options = is_causal, scale, enable_gqa
    reason = _fallback_reason(query, key, value, attn_mask, dropout_p, *options)
    if reason is None:
        out: Tensor = flash_attention(query, key, value, is_causal, scale)
        return out
    # torch.compile does not trace warnings.
    if not torch.compiler.is_compiling() and reason not in _warned:
        _warned.add(reason)
        warnings.warn(
            f"scaled_dot_product_attention uses torch's implementation: {reason}", stacklevel=2
        )
    return torch_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


_warned: set[str] = set()
# torch's function at the time of the import, which a caller may replace by the function above
torch_attention = functional.scaled_dot_product_attention


def _fallback_reason(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: object,
    scale: object,
    enable_gqa: bool,
) -> str | None:
    if attn_mask is not None:
        return "attn_mask is given, and flash_attention has only causal masks and windows"
    if dropout_p != 0:
        return "dropout_p is not 0, and flash_attention has no dropout"
    if not all(isinstance(x, Tensor) and not x.is_nested for x in (query, key, value)):
        return "flash_attention accepts only tensors, and no nested ones"
    if torch._C._are_functorch_transforms_active():
        return "flash_attention does not support transforms of torch.func"
    q, k, v = autocast(query, key, value)
    if tensor_errors(*_properties(q, k, v)):
        return "flash_attention does not accept these shapes, dtypes or devices"
    if not isinstance(is_causal, bool) or scale_error(scale):
        return "flash_attention does not accept this is_causal or scale"
    if not isinstance(enable_gqa, bool) or (enable_gqa and query.dim() < 3):
        return "flash_attention does not accept this enable_gqa"
    if not enable_gqa and query.dim() > 2 and query.shape[-3] != key.shape[-3]:
        return "key has fewer heads than query, and enable_gqa is False"
    return None


def _raise_errors(
    q: Tensor, k: Tensor, v: Tensor, options: Options, form: str, others: Sequence[str] = ()
) -> None:
    """Raise a ValueError with all errors of the arguments, if any. `form` is a key of FORMS."""
    errors = option_errors(options, ATTENTIONS)
    errors += [*tensor_errors(*_properties(q, k, v), form), *others]
    if errors:
        raise ValueError("; ".join(errors))


def _properties(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, Any, Any]:
    """Return the shapes, the dtypes and the devices."""
    qkv = q, k, v
    return [x.shape for x in qkv], [x.dtype for x in qkv], [x.device for x in qkv]


# Name of an implementation, the call, and the plan of `Implementation.plan`
Choice = tuple[str, Call, Any]
_chosen: dict[tuple[Any, ...], Choice] = {}  # for arguments that were checked before


def _choose(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Choice:
    """Return the choice for arguments of `flash_attention`. Raises ValueError as it does.

    Equal arguments are checked once, and "auto" chooses once for them, because this takes a
    considerable part of a call with small inputs.
    """
    if is_traced():
        return _check_and_choose(q, k, v, options)
    needs_gradient = torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad
    )
    # With types, because True == 1 == 1.0, but an argument may accept only one of them.
    types = tuple(map(type, options))
    window = options.window
    if window is not NO_WINDOW and isinstance(window, (tuple, list)):
        types += tuple(map(type, window))
    try:
        key = signature(q, k, v), needs_gradient, options, types
        found = _chosen.get(key)
    except (TypeError, RuntimeError):  # an option that cannot be hashed; a tensor without strides
        return _check_and_choose(q, k, v, options)
    if found is None:
        found = _check_and_choose(q, k, v, options)
        if len(_chosen) >= MAX_PLANS:
            _chosen.pop(next(iter(_chosen)), None)  # another thread may have removed it
        _chosen[key] = found
    return found


def _check_and_choose(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Choice:
    layout = options.layout if options.layout in LAYOUTS else LAYOUTS[0]
    _raise_errors(q, k, v, options, layout)
    if layout == LAYOUTS[1]:
        q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    q, k, v = (four_dimensional(x) for x in (q, k, v))
    if q.shape[-2] == k.shape[-2]:  # both are the same, and more implementations have this one
        options = options._replace(alignment=ALIGNMENTS[0])
    call, implementation = make_call(options), options.implementation
    if q.numel() == 0 or k.numel() == 0:
        implementation = "naive"  # torch 2.11's fused kernels crash the process on empty inputs
    if implementation == "auto":
        implementation = best_implementation(q, k, v, call)
    if is_traced() or unsupported_reason(q, k, v, implementation, call):
        return implementation, call, None
    return implementation, call, ATTENTIONS[implementation].plan(q, k, v, call)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, implementation: str, call: Call, plan: Any = None
) -> Any:
    """Call the implementation with this name, with checked arguments."""
    found = ATTENTIONS[implementation]
    if plan is not None:
        return found.attend(q, k, v, plan)
    reason = unsupported_reason(q, k, v, implementation, call)
    if reason:
        others = [name for name in ATTENTIONS if not unsupported_reason(q, k, v, name, call)]
        raise RuntimeError(
            f"{reason}; implementations that support these inputs: auto, {', '.join(others)}"
        )
    if call.scale is not None and call.scale < 0 and not found.any_scale:
        q, call = -q, call._replace(scale=-call.scale)
    if torch.compiler.is_compiling():
        # torch.compile rejects an autograd.Function that gets the same tensor twice.
        q, k, v = (x.view_as(x) for x in (q, k, v))
    return found.attend(q, k, v, call)
