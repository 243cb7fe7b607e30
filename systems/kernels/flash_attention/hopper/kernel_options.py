"""Mask, softcap and scale of an attention call, in the form of arguments of the Hopper kernels."""

from __future__ import annotations

import math
from typing import NamedTuple

from systems.kernels.flash_attention.call import Call
from systems.kernels.flash_attention.triton.base_plan import LOG2E, MAX_WINDOW

# Smallest scale of a bounded mask. The forward kernel multiplies masked scores, which are -inf, by
# the scale, and -inf * 0 is NaN. This scale gives finite scores the same results as 0.
SMALLEST_SCALE = 1e-30


class KernelOptions(NamedTuple):
    """Arguments that the forward kernel and the backward kernels have in common.

    Fields:
        constants: values of the constexpr parameters from IS_CAUSAL to SOFTCAP, in the order of the
            parameters.
        bounds: values of left and right.
        scale: scale of the scores.
        scales: values of scale_log2e and cap_log2e.
        may_split: whether the inner loop may be split into ranges. With a left bound, a block sees
            only few of the ranges, and the kernels do not support it. They do not split packed
            sequences either.
    """

    constants: dict[str, bool]
    bounds: tuple[int, int]
    scale: float
    scales: tuple[float, float]
    may_split: bool

    @property
    def is_bounded(self) -> bool:
        return self.constants["BOUNDED"]

    def visible(self, n_queries: int, n_keys: int) -> tuple[int, int]:
        """Return (lower, upper): query i sees the keys from i + lower to i + upper."""
        left, right = self.bounds
        if not self.is_bounded:
            left, right = MAX_WINDOW, 0 if self.constants["IS_CAUSAL"] else MAX_WINDOW
        shift = n_keys - n_queries if self.constants["LOWER_RIGHT"] else 0
        return shift - left, shift + right


def kernel_options(call: Call, lengths: tuple[int, int], head_dim: int) -> KernelOptions:
    """Return the arguments of the kernels; `lengths` are the queries and keys per head."""
    mask, is_packed = call.mask, call.packing is not None
    if not is_packed:  # bounds beyond all keys change nothing
        left, right = (
            None if bound is not None and bound >= max(lengths) else bound
            for bound in (mask.left, mask.right)
        )
        mask = mask._replace(left=left, right=right)
    # Without packing, equal lengths make both alignments the same.
    lower_right = mask.lower_right and (is_packed or lengths[0] != lengths[1])
    is_plain = mask.left is None and mask.right in (None, 0) and not lower_right
    constants = {
        "IS_CAUSAL": mask.right == 0, "BOUNDED": is_packed or not is_plain,
        "LOWER_RIGHT": lower_right, "PACKED": is_packed, "SOFTCAP": call.softcap is not None,
    }  # fmt: skip
    left, right = (
        MAX_WINDOW if bound is None else min(bound, MAX_WINDOW) for bound in (mask.left, mask.right)
    )
    scale = 1 / math.sqrt(head_dim) if call.scale is None else float(call.scale)
    scale_log2e, cap = scale * LOG2E, call.softcap
    if cap is not None:
        scale_log2e *= 2 / cap
    elif constants["BOUNDED"] and 0 <= scale_log2e < SMALLEST_SCALE:
        scale_log2e = SMALLEST_SCALE
    return KernelOptions(
        constants, (left, right), scale, (scale_log2e, (cap or 0.0) * LOG2E),
        not is_packed and mask.left is None,
    )  # fmt: skip
