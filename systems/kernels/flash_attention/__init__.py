"""Attention: softmax(QK^T / sqrt(D)) V, plain and fused, one signature for all."""

from systems.kernels.flash_attention.api import flash_attention
from systems.kernels.flash_attention.autograd import FlashAttentionHopper, FlashAttentionTriton
from systems.kernels.flash_attention.naive import masked_scores, naive
from systems.kernels.flash_attention.reference import AttentionReference, attention_reference
from systems.kernels.flash_attention.registry import ATTENTIONS, why_not
from systems.kernels.flash_attention.sdpa import SDPA_BACKENDS, sdpa, why_not_sdpa
from systems.kernels.flash_attention.tiled import FlashAttentionPyTorch

__all__ = [
    "ATTENTIONS",
    "SDPA_BACKENDS",
    "AttentionReference",
    "FlashAttentionHopper",
    "FlashAttentionPyTorch",
    "FlashAttentionTriton",
    "attention_reference",
    "flash_attention",
    "masked_scores",
    "naive",
    "sdpa",
    "why_not",
    "why_not_sdpa",
]
