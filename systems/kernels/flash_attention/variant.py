"""Variants of attention beyond a causal mask and a scale: windows, alignment, softcap, packing."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Variant(NamedTuple):
    """Options of attention that change which keys a query sees, or the scores.

    The mask is described with positions. Key j has the position j. Query i has the position i if
    the mask is aligned to the upper left corner of the scores, and i + n_keys - n_queries if it is
    aligned to the lower right corner. With a window (left, right), a query at position p sees the
    keys from p - left to p + right. A causal mask is a window with right = 0.

    Fields:
        window_left: number of keys before its position that a query sees; None for all.
        window_right: number of keys after its position that a query sees; None for all.
        lower_right: whether the mask is aligned to the lower right corner, so that the last query
            has the position of the last key.
        softcap: each score s, after scaling, becomes softcap * tanh(s / softcap); None for no cap.
    """

    window_left: int | None = None
    window_right: int | None = None
    lower_right: bool = False
    softcap: float | None = None

    def mask(self, is_causal: bool) -> Mask:
        """Return the mask of this variant, with a causal mask in addition if is_causal is True."""
        right = self.window_right
        if is_causal:
            right = 0 if right is None else min(right, 0)
        left = self.window_left
        # Without bounds, the alignment does not matter.
        lower_right = self.lower_right and (left is not None or right is not None)
        return Mask(left, right, lower_right)


class Mask(NamedTuple):
    """Mask of attention: a query at position p sees the keys from p - left to p + right.

    None means that there is no bound. `Variant` describes positions and lower_right.
    """

    left: int | None
    right: int | None
    lower_right: bool

    def bounds(self, n_queries: int, n_keys: int) -> tuple[int | None, int | None]:
        """Return (lower, upper), where query i sees the keys from i + lower to i + upper.

        None means that there is no bound.
        """
        shift = n_keys - n_queries if self.lower_right else 0
        lower = None if self.left is None else shift - self.left
        upper = None if self.right is None else shift + self.right
        return lower, upper


class Packing(NamedTuple):
    """Boundaries of sequences that are packed one after another along the rows of q, k and v.

    Fields:
        starts_q, starts_k: int32 (n_sequences + 1,), on the device of q. Sequence s has the rows
            from starts[s] to starts[s + 1] - 1 of q, or of k and v. These tensors are the
            cu_seqlens of flash-attn's functions.
        max_queries, max_keys: length of the longest sequence of queries, and of keys.
    """

    starts_q: Tensor
    starts_k: Tensor
    max_queries: int
    max_keys: int


NO_VARIANT = Variant()
