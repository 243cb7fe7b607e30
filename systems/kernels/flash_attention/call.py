"""A call of attention: its options, and the properties of its tensors on which plans depend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Maximum number of entries in each cache of checks and launch plans. A length takes 15 to 25 KB in
# all of them.
MAX_PLANS = 512
Shapes = tuple[tuple[int, ...], ...]  # shapes or strides of several tensors


class Mask(NamedTuple):
    """Mask of attention: a query at position p sees the keys from p - left to p + right.

    None means that there is no bound. Key j has the position j. Query i has the position i, or with
    lower_right i + n_keys - n_queries, so that the last query has the position of the last key.
    """

    left: int | None
    right: int | None
    lower_right: bool

    def bounds(self, n_queries: int, n_keys: int) -> tuple[int | None, int | None]:
        """Return (lower, upper): query i sees the keys from i + lower to i + upper; or None."""
        shift = n_keys - n_queries if self.lower_right else 0
        lower = None if self.left is None else shift - self.left
        upper = None if self.right is None else shift + self.right
        return lower, upper


class Packing(NamedTuple):
    """Boundaries of sequences that are packed one after another along the rows of q, k and v.

    Fields:
        starts_q, starts_k: int32 (n_sequences + 1,), contiguous, on the device of q. Sequence s has
            the rows from starts[s] to starts[s + 1] - 1 of q, or of k and v. These tensors are the
            cu_seqlens of flash-attn's functions.
        max_queries, max_keys: length of the longest sequence of queries, and of keys.
    """

    starts_q: Tensor
    starts_k: Tensor
    max_queries: int
    max_keys: int

    @property
    def sizes(self) -> PackedSizes:
        """Return the sizes on which launch plans depend.

        Raises:
            ValueError: if the boundaries are not contiguous int32 tensors.
        """
        for starts in self[:2]:
            if starts.dtype != torch.int32 or not starts.is_contiguous():
                raise ValueError(
                    "boundaries of packed sequences must be contiguous int32 tensors, got "
                    f"{starts.dtype} with strides {starts.stride()}"
                )
        return PackedSizes(len(self.starts_q) - 1, self.max_queries, self.max_keys)


class PackedSizes(NamedTuple):
    """Number of packed sequences, and length of the longest one of queries, and of keys."""

    n_sequences: int
    max_queries: int
    max_keys: int


class Call(NamedTuple):
    """The options of a call of attention. `api.flash_attention` describes them for users.

    Fields:
        is_causal: whether a query sees only keys up to its position. It adds right = 0 to the mask.
        scale: multiplies the scores; None for 1/sqrt(head_dim).
        window_left, window_right, lower_right: the fields of `Mask`.
        softcap: each score s, after scaling, becomes softcap * tanh(s / softcap); None for no cap.
        packing: boundaries of packed sequences. Tensors are then (heads, rows of all sequences,
            head_dim). For launch plans, only their sizes.
        return_lse: whether to return the log-sum-exp of the scores, too.
        precision: of the matmuls of float32 inputs in flash_triton, "fp16x3" or "tf32", see
            `triton.launch.flash_forward`.
    """

    # `is_plain` and the operators in `autograd` use the order of the fields.
    is_causal: bool = False
    scale: float | None = None
    window_left: int | None = None
    window_right: int | None = None
    lower_right: bool = False
    softcap: float | None = None
    packing: Packing | PackedSizes | None = None
    return_lse: bool = False
    precision: str = "fp16x3"

    @property
    def mask(self) -> Mask:
        right = self.window_right
        if self.is_causal:
            right = 0 if right is None else min(right, 0)
        left = self.window_left
        # Without bounds, the alignment does not matter.
        lower_right = self.lower_right and (left is not None or right is not None)
        return Mask(left, right, lower_right)

    @property
    def is_plain(self) -> bool:
        """Whether the call has only a causal mask and a scale."""
        return self[2:8] == PLAIN[2:8]

    def for_plan(self) -> Call:
        """Return the part of the call on which launch plans depend, see `Packing.sizes`."""
        packing = self.packing
        return self._replace(packing=packing.sizes) if isinstance(packing, Packing) else self


PLAIN = Call()

GROUPED, VALUE_DIM, WINDOW, LOWER_RIGHT, SOFTCAP, LSE, PACKED = FEATURES = (
    "grouped heads", "another head dimension of v", "windows", "lower-right alignment", "softcap",
    "log-sum-exp", "packed sequences",
)  # fmt: skip


class Implementation(NamedTuple):
    """An implementation of attention, and what it supports.

    Fields:
        attend: a function (q, k, v, call) of tensors (batch, heads, rows, head_dim), or packed
            (heads, rows, head_dim). It returns the output, and with call.return_lse also the
            log-sum-exp. `api.flash_attention` checks the arguments before.
        features: those of FEATURES that it has.
        unsupported_reason: a function (q, k, v, call) that returns why it does not support the
            call on this machine, or None if it does. It need not check the features.
        form_reason: a function (dtype, head_dim, value_dim) that returns why it does not support
            such tensors on any machine, or None if it does.
        gpus: the GPUs on which it runs, as text for tables.
        any_scale: whether the scale may be negative. Others mask scores before they scale them.
        plan: a function (q, k, v, call) that returns what `attend` may get instead of the call, for
            tensors with the shapes, strides, dtypes and device of these, to save host time; None if
            there is no such thing. The call is supported, and not packed.
    """

    attend: Callable[[Tensor, Tensor, Tensor, Any], Any]
    features: frozenset[str] = frozenset()
    unsupported_reason: Callable[[Tensor, Tensor, Tensor, Call], str | None] = lambda *_: None
    form_reason: Callable[[torch.dtype, int, int], str | None] = lambda *_: None
    gpus: str = "any device"
    any_scale: bool = False
    plan: Callable[[Tensor, Tensor, Tensor, Call], Any] = lambda *_: None


def features(q: Tensor, k: Tensor, v: Tensor, call: Call) -> list[str]:
    """Return the features of FEATURES that a call needs."""
    if q.shape == k.shape == v.shape and call.is_plain:  # most calls
        return []
    is_packed = call.packing is not None
    has_window = call.window_left is not None or call.window_right is not None
    # Without packing, equal lengths make both alignments the same.
    shifts = call.mask.lower_right and (is_packed or q.shape[-2] != k.shape[-2])
    needs = (
        q.shape[-3] != k.shape[-3], q.shape[-1] != v.shape[-1], has_window, shifts,
        call.softcap is not None, call.return_lse, is_packed,
    )  # fmt: skip
    return [feature for feature, needed in zip(FEATURES, needs, strict=True) if needed]


def signature(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, Any, Any, Any]:
    """Return the three shapes, strides, dtypes and devices, on which launch plans depend."""
    return (
        (q.shape, k.shape, v.shape),
        (q.stride(), k.stride(), v.stride()),
        (q.dtype, k.dtype, v.dtype),
        (q.device, k.device, v.device),
    )


def is_traced() -> bool:
    """Return whether torch.compile or a torch dispatch mode sees the operators that are called."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v, cast to the autocast dtype if autocast is enabled for their device.

    They are unchanged if the dtype of any of them is not float32, bfloat16 or float16.
    """
    device_type = q.device.type
    # torch.is_autocast_enabled raises an error for the meta device.
    if q.is_meta or not torch.is_autocast_enabled(device_type):
        return q, k, v
    if not {q.dtype, k.dtype, v.dtype} <= {torch.float32, torch.bfloat16, torch.float16}:
        return q, k, v
    dtype = torch.get_autocast_dtype(device_type)
    return q.to(dtype), k.to(dtype), v.to(dtype)
