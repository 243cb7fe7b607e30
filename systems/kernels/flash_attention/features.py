"""Features of attention beyond a causal mask and a scale, and which of them a call needs."""

from __future__ import annotations

from torch import Tensor

from systems.kernels.flash_attention.variant import NO_VARIANT, Variant

GROUPED, VALUE_DIM, WINDOW, LOWER_RIGHT, SOFTCAP, LSE, PACKED = FEATURES = (
    "grouped heads", "another head dimension of v", "windows", "lower-right alignment", "softcap",
    "log-sum-exp", "packed sequences",
)  # fmt: skip


def features(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    variant: Variant = NO_VARIANT,
    is_packed: bool = False,
    return_lse: bool = False,
) -> list[str]:
    """Return the features of FEATURES that a call of attention needs.

    Tensors are (batch, heads, seq_len, head_dim), or with is_packed (heads, rows, head_dim). The
    options are those of `api.flash_attention`.
    """
    mask = variant.mask(is_causal)
    has_window = variant.window_left is not None or variant.window_right is not None
    # Without packing, equal lengths make both alignments the same.
    shifts = mask.lower_right and (is_packed or q.shape[-2] != k.shape[-2])
    needs = (
        q.shape[-3] != k.shape[-3], q.shape[-1] != v.shape[-1], has_window, shifts,
        variant.softcap is not None, return_lse, is_packed,
    )  # fmt: skip
    return [feature for feature, needed in zip(FEATURES, needs, strict=True) if needed]
