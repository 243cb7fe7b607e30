"""Implementations of attention, softmax(Q K^T * scale) V, with a common signature.

`flash_attention` checks its inputs and selects an implementation, `flash_attention_packed` does the
same for packed sequences, and `scaled_dot_product_attention` replaces torch's function of this
name. `ATTENTIONS` is the table of the implementations (see `call.Implementation`).
"""

from systems.kernels.flash_attention.api import (
    flash_attention,
    flash_attention_packed,
    scaled_dot_product_attention,
)
from systems.kernels.flash_attention.autograd import FlashAttentionHopper, FlashAttentionTriton
from systems.kernels.flash_attention.call import Call, Packing
from systems.kernels.flash_attention.flash_pytorch import FlashAttentionPyTorch
from systems.kernels.flash_attention.implementations import ATTENTIONS, unsupported_reason
from systems.kernels.flash_attention.naive import naive
from systems.kernels.flash_attention.reference import AttentionReference, attention_reference

__all__ = [
    "ATTENTIONS",
    "AttentionReference",
    "Call",
    "FlashAttentionHopper",
    "FlashAttentionPyTorch",
    "FlashAttentionTriton",
    "Packing",
    "attention_reference",
    "flash_attention",
    "flash_attention_packed",
    "naive",
    "scaled_dot_product_attention",
    "unsupported_reason",
]
