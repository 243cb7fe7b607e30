"""Implementations of attention, softmax(Q K^T * scale) V, with a common signature.

All implementations are functions (q, k, v, is_causal, scale). `flash_attention` checks its inputs
and selects an implementation, `flash_attention_packed` does the same for packed sequences, and
`scaled_dot_product_attention` replaces torch's function of this name.
"""

from systems.kernels.flash_attention.api import flash_attention, flash_attention_packed
from systems.kernels.flash_attention.autograd import FlashAttentionHopper, FlashAttentionTriton
from systems.kernels.flash_attention.drop_in import scaled_dot_product_attention
from systems.kernels.flash_attention.flash_pytorch import FlashAttentionPyTorch
from systems.kernels.flash_attention.naive import masked_scores, naive
from systems.kernels.flash_attention.peers.sdpa import SDPA_BACKENDS, sdpa, sdpa_unsupported_reason
from systems.kernels.flash_attention.reference import AttentionReference, attention_reference
from systems.kernels.flash_attention.registry import ATTENTIONS, unsupported_reason

__all__ = [
    "ATTENTIONS",
    "SDPA_BACKENDS",
    "AttentionReference",
    "FlashAttentionHopper",
    "FlashAttentionPyTorch",
    "FlashAttentionTriton",
    "attention_reference",
    "flash_attention",
    "flash_attention_packed",
    "masked_scores",
    "naive",
    "scaled_dot_product_attention",
    "sdpa",
    "sdpa_unsupported_reason",
    "unsupported_reason",
]
