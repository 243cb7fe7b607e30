"""Checks of the attention inputs q, k and v, used by `flash_attention` and by the kernels."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from systems.kernels.device import runs_kernels
from systems.kernels.flash_attention.triton.tile_table import (
    KERNEL_DTYPES,
    MAX_HEAD_DIM,
    PRECISIONS,
)
from systems.kernels.triton_interpreter import mend_interpreter

# Maximum number of entries in each cache of launch plans or checked inputs. A length takes 15 to 25
# KB in all of them.
MAX_PLANS = 512
Shapes = tuple[tuple[int, ...], ...]  # shapes or strides of several tensors
FORM = (
    "q must be (..., heads, n_queries, head_dim), k (..., heads, n_keys, head_dim) and v "
    "(..., heads, n_keys, value_dim)"
)


def qkv_errors(
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    devices: Sequence[torch.device],
    valid_dtypes: Sequence[torch.dtype],
    max_head_dim: int | None = None,
    form: str = FORM,
    given: Sequence[Sequence[int]] | None = None,
) -> list[str]:
    """Return a list of error messages for invalid shapes, dtypes or devices of q, k and v.

    The list is empty if they are valid. `form` has the valid dimensions, and `given` the shapes for
    messages, by default `shapes`. Without max_head_dim, there is no limit.
    """
    errors = []
    q, k, v = shapes
    if (
        min(len(q), len(k), len(v)) < 2
        or k[:-1] != v[:-1]
        or q[-1] != k[-1]
        or not _heads_fit(q[:-2], k[:-2])
    ):
        shown = zip("qkv", given or shapes, strict=True)
        errors.append(
            f"{form}, with equal leading dimensions, except that k and v may have fewer heads if "
            "their number divides that of q, got "
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


def signature(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, Any, Any, Any]:
    """Return the properties of q, k and v on which checks and launch plans depend.

    They are the key of the caches of checks and launch plans: the three shapes, the three strides,
    the three dtypes and the three devices.
    """
    return (
        (q.shape, k.shape, v.shape),
        (q.stride(), k.stride(), v.stride()),
        (q.dtype, k.dtype, v.dtype),
        (q.device, k.device, v.device),
    )


@functools.lru_cache(maxsize=MAX_PLANS)
def check_kernel_inputs(
    shapes: Shapes,
    strides: Shapes,
    dtypes: tuple[torch.dtype, ...],
    devices: tuple[torch.device, ...],
    precision: str = "fp16x3",
) -> None:
    """Check whether the Triton and Hopper kernels accept the inputs.

    Shapes, strides, dtypes and devices are those of q, k and v, from `signature`. All strides are
    accepted. `triton.launch.flash_forward` describes precision.

    Raises:
        ValueError: if the inputs are invalid; the message lists all errors.
        RuntimeError: if Triton kernels do not run on the device of the inputs.
    """
    errors = qkv_errors(shapes, dtypes, devices, KERNEL_DTYPES, MAX_HEAD_DIM)
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
