"""Checks of the arguments of `flash_attention` and `flash_attention_packed`, and of the kernels."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from systems.kernels.device import runs_kernels
from systems.kernels.flash_attention.call import Call, Packing, Shapes
from systems.kernels.flash_attention.triton.tile_table import (
    KERNEL_DTYPES,
    MAX_HEAD_DIM,
    PRECISIONS,
)
from systems.kernels.triton_interpreter import mend_interpreter

DTYPES = (*KERNEL_DTYPES, torch.float64)
ALIGNMENTS = ("upper_left", "lower_right")
LONGEST_VALUE = 100  # number of characters of a value in a message; of others, the type is told
LAYOUTS = ("bhsd", "bshd")
PACKED = "packed"  # the layout of `flash_attention_packed`
FORMS = {
    LAYOUTS[0]: (
        "q must be (..., heads, n_queries, head_dim), k (..., heads, n_keys, head_dim) and v "
        "(..., heads, n_keys, value_dim)"
    ),
    LAYOUTS[1]: (
        "with layout='bshd', q must be (..., n_queries, heads, head_dim), k (..., n_keys, heads, "
        "head_dim) and v (..., n_keys, heads, value_dim)"
    ),
    PACKED: (
        "packed q must be (rows of all sequences, heads, head_dim), and k and v (rows of all "
        "sequences, heads, head_dim or value_dim)"
    ),
}
# A window without limit in practice. Larger numbers do not fit into the arguments of operators.
_MAX_WINDOW = 2**31 - 1
# Beyond these limits, the softcap, its reciprocal or a score times it is not a float32 number.
_MIN_SOFTCAP, _MAX_SOFTCAP = 1e-18, 1e18
_MAX_FLOAT32 = torch.finfo(torch.float32).max


class Options(NamedTuple):
    """The options of `api.flash_attention`, as a user gave them."""

    is_causal: Any
    scale: Any
    implementation: Any
    window: Any
    alignment: Any
    softcap: Any
    return_lse: Any
    layout: Any


def require_tensors(q: Any, k: Any, v: Any) -> None:
    """Raise a ValueError if q, k or v is not a tensor with a shape."""
    are_tensors = isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    if are_tensors and not (q.is_nested or k.is_nested or v.is_nested):  # most calls
        return
    errors = [
        f"{name} must be a tensor, got {_describe(x)}"
        if not isinstance(x, Tensor)
        else f"{name} must not be a nested tensor; flash_attention_packed takes packed sequences"
        for name, x in zip("qkv", (q, k, v), strict=True)
        if not isinstance(x, Tensor) or x.is_nested
    ]
    if errors:
        raise ValueError("; ".join(errors))


def tensor_errors(
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    devices: Sequence[torch.device],
    layout: str = LAYOUTS[0],
    valid_dtypes: Sequence[torch.dtype] = DTYPES,
    max_head_dim: int | None = None,
) -> list[str]:
    """Return error messages for invalid shapes, dtypes or devices of q, k and v.

    FORMS describes the dimensions by layout. Without max_head_dim, there is no limit.
    """
    given = shapes
    if layout != LAYOUTS[0]:  # with heads before rows; an empty shape is always an error
        n_dims = 3 if layout == PACKED else max(3, len(shapes[0]))
        fits = all(len(shape) == n_dims for shape in given)
        shapes = [(*s[:-3], s[-2], s[-3], s[-1]) if fits else () for s in given]
    errors = []
    q, k, v = shapes
    if (
        min(len(q), len(k), len(v)) < 2
        or k[:-1] != v[:-1]
        or q[-1] != k[-1]
        or not _heads_fit(q[:-2], k[:-2])
    ):
        shown = zip("qkv", given, strict=True)
        errors.append(
            f"{FORMS[layout]}, with equal leading dimensions, except that k and v may have fewer "
            "heads if their number divides that of q, got "
            + ", ".join(f"{name} {tuple(shape)}" for name, shape in shown)
        )
    for name, shape in (("head_dim", q), ("value_dim", v)):
        if name == "value_dim" and len(v) and len(q) and v[-1] == q[-1]:
            continue
        if len(shape) and (shape[-1] < 1 or (max_head_dim and shape[-1] > max_head_dim)):
            valid = "1 or more" if max_head_dim is None else f"1 to {max_head_dim}"
            errors.append(f"{name} must be {valid}, got {shape[-1]}")
    if dtypes[0] not in valid_dtypes or not dtypes[0] == dtypes[1] == dtypes[2]:
        errors.append(
            f"q, k and v must have the same dtype (one of {', '.join(map(str, valid_dtypes))}), "
            f"got {', '.join(map(str, dtypes))}"
        )
    if not devices[0] == devices[1] == devices[2]:
        errors.append(f"q, k and v must be on the same device, got {', '.join(map(str, devices))}")
    return errors


def _heads_fit(q: Sequence[int], k: Sequence[int]) -> bool:
    """Return True if these leading dimensions of q and k fit. The last is the number of heads."""
    if not q or not k:
        return q == k
    return q[:-1] == k[:-1] and (q[-1] == k[-1] or (k[-1] > 0 and q[-1] % k[-1] == 0))


def option_errors(options: Options, implementations: Collection[str]) -> list[str]:
    """Return error messages for invalid options. `implementations` does not include "auto"."""
    is_causal, scale, implementation, window, alignment, softcap, return_lse, layout = options
    errors = []
    valid = ["auto", *implementations]
    if implementation not in valid:
        close = difflib.get_close_matches(str(implementation), valid, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        errors.append(
            f"implementation must be one of {', '.join(valid)}, got {implementation!r}{hint}"
        )
    if not isinstance(is_causal, bool):
        errors.append(
            "is_causal must be True or False (other masks are not supported), got "
            f"{_describe(is_causal)}"
        )
    error_of_scale = scale_error(scale)
    errors += [error_of_scale] if error_of_scale else []  # torch.compile cannot trace filter(None)
    if not isinstance(return_lse, bool):
        errors.append(f"return_lse must be True or False, got {_describe(return_lse)}")
    bounds = window if isinstance(window, (tuple, list)) else ()
    if len(bounds) != 2 or not all(bound is None or _is_natural(bound) for bound in bounds):
        errors.append(
            "window must be (left, right), each a number of keys from 0 on or None for no limit, "
            f"got {_describe(window)}"
        )
    if softcap is not None and not _is_between(softcap, _MIN_SOFTCAP, _MAX_SOFTCAP):
        errors.append(
            f"softcap must be a number from {_MIN_SOFTCAP:g} to {_MAX_SOFTCAP:g}, or None, got "
            f"{_describe(softcap)}"
        )
    for name, given, names in (("alignment", alignment, ALIGNMENTS), ("layout", layout, LAYOUTS)):
        if given not in names:
            errors.append(f"{name} must be one of {', '.join(names)}, got {given!r}")
    return errors


def scale_error(scale: object) -> str | None:
    """Return an error message for an invalid scale, or None if it is valid."""
    if scale is None or _is_between(scale, -_MAX_FLOAT32, _MAX_FLOAT32):
        return None
    return (
        "scale must be a finite number, not a tensor (scale gets no gradient), got "
        f"{_describe(scale)}"
    )


def packing_errors(
    device: torch.device,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> list[str]:
    """Return error messages for invalid boundaries, whose values `make_packing` checks."""
    errors = []
    for name, starts in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if not isinstance(starts, Tensor):
            errors.append(f"{name} must be a tensor, got {_describe(starts)}")
        elif starts.dim() != 1 or len(starts) < 2 or starts.dtype != torch.int32:
            errors.append(
                f"{name} must be an int32 tensor of n_sequences + 1 numbers, got {starts.dtype} "
                f"of shape {tuple(starts.shape)}"
            )
        elif starts.device != device:
            errors.append(f"{name} must be on the device of q, {device}, got {starts.device}")
    if not errors and len(cu_seqlens_q) != len(cu_seqlens_k):
        errors.append(
            "cu_seqlens_q and cu_seqlens_k must have the same number of sequences, got "
            f"{len(cu_seqlens_q) - 1} and {len(cu_seqlens_k) - 1}"
        )
    for name, longest in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if longest is not None and not _is_natural(longest):
            errors.append(f"{name} must be a number from 0 on, or None, got {_describe(longest)}")
    return errors


def make_packing(
    rows_q: int,
    rows_k: int,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> Packing:
    """Return the packed sequences, with the lengths of the longest ones.

    If a length is not given, it is computed, and all boundaries are checked. This copies them from
    the GPU. On a CPU, they are always checked, except under torch.compile.

    Raises:
        ValueError: if the boundaries do not go from 0 to the number of rows, or decrease, or if a
            sequence is longer than its max_seqlen. Only if boundaries are checked.
    """
    on_cpu = cu_seqlens_q.device.type == "cpu" and not torch.compiler.is_compiling()
    if max_seqlen_q is None or max_seqlen_k is None or on_cpu:
        longest_q = _longest("cu_seqlens_q", cu_seqlens_q, rows_q)
        longest_k = _longest("cu_seqlens_k", cu_seqlens_k, rows_k)
        max_seqlen_q = _at_least("max_seqlen_q", max_seqlen_q, longest_q)
        max_seqlen_k = _at_least("max_seqlen_k", max_seqlen_k, longest_k)
    # Kernels read the boundaries with a stride of 1. The lengths determine the number of programs.
    return Packing(
        cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous(),
        min(int(max_seqlen_q), rows_q), min(int(max_seqlen_k), rows_k),
    )  # fmt: skip


def make_call(options: Options) -> Call:
    """Return the call for valid options. Equal masks give equal calls.

    A window that ends at the position of the query is causal. Without bounds, the alignment does
    not matter.
    """
    left, right = (
        None if bound is None else min(int(bound), _MAX_WINDOW) for bound in options.window
    )
    is_causal = options.is_causal or right == 0
    right = None if is_causal else right
    has_bounds = is_causal or left is not None or right is not None
    lower_right = has_bounds and options.alignment == ALIGNMENTS[1]
    scale, softcap = _as_float(options.scale), _as_float(options.softcap)
    return Call(is_causal, scale, left, right, lower_right, softcap, return_lse=options.return_lse)


def _as_float(number: float | None) -> float | None:
    """Return a valid number as a type that torch's operators accept."""
    return number if number is None or isinstance(number, (int, float)) else float(number)


def _longest(name: str, starts: Tensor, n_rows: int) -> int:
    boundaries = starts.cpu().long()  # differences of int32 numbers could wrap
    lengths = boundaries.diff()
    if boundaries[0] != 0 or boundaries[-1] != n_rows or (lengths < 0).any():
        raise ValueError(
            f"{name} must go from 0 to the number of rows, {n_rows}, without decreasing, got "
            f"{boundaries.tolist() if len(boundaries) < 20 else boundaries}"
        )
    return int(lengths.max())


def _at_least(name: str, given: int | None, longest: int) -> int:
    """Return the given maximum length, or the length of the longest sequence if it is None."""
    if given is not None and given < longest:
        raise ValueError(
            f"{name} must be at least the length of the longest sequence, {longest}, got {given}"
        )
    return longest if given is None else given


def _is_natural(x: object) -> bool:
    return isinstance(x, Integral) and not isinstance(x, bool) and int(x) >= 0


def _is_between(x: object, lowest: float, highest: float) -> bool:
    """Return True for a number in this range. NaN is in no range."""
    return isinstance(x, Real) and not isinstance(x, bool) and bool(lowest <= x <= highest)  # type: ignore[operator]


def _describe(x: object) -> str:
    if isinstance(x, Tensor):
        return f"a tensor of shape {tuple(x.shape)}"
    return repr(x) if len(repr(x)) <= LONGEST_VALUE else f"a value of type {type(x).__name__}"


def check_kernel_inputs(
    shapes: Shapes,
    dtypes: Sequence[torch.dtype],
    devices: Sequence[torch.device],
    precision: str = "fp16x3",
) -> None:
    """Check whether the Triton and Hopper kernels accept q, k and v of these properties.

    `triton.launch.flash_forward` describes precision. On a CPU, Triton's interpreter is patched.

    Raises:
        ValueError: if the inputs are invalid; the message lists all errors.
        RuntimeError: if Triton kernels do not run on the device of the inputs.
    """
    errors = tensor_errors(shapes, dtypes, devices, LAYOUTS[0], KERNEL_DTYPES, MAX_HEAD_DIM)
    if precision not in PRECISIONS:
        errors.append(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
    if errors:
        raise ValueError("; ".join(errors))
    if not runs_kernels(devices[0]):
        raise RuntimeError(
            f"the Triton kernels need a GPU, got tensors on {devices[0]}; set TRITON_INTERPRET=1 "
            "in the environment to run the kernels in Triton's interpreter on a CPU"
        )
    if devices[0].type == "cpu":
        mend_interpreter()
