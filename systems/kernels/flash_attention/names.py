"""Attention by name, so that a model, a sweep and a table mean the same by it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from systems.kernels.flash_attention.naive import naive
from systems.kernels.flash_attention.sdpa import SDPA_BACKENDS, sdpa

# (q, k, v, is_causal=...) -> out; q, k, v (batch, heads, seq_len, head_dim).
ATTENTIONS: dict[str, Callable[..., Tensor]] = {
    "naive": naive,
    "sdpa": scaled_dot_product_attention,  # the backend that torch chooses
    **{name: partial(sdpa, implementation=name) for name in SDPA_BACKENDS},
}
