"""The implementations of attention: the name of each, and its modules.

This module does not import torch, so that a sweep can be checked without it.
"""

from __future__ import annotations

# The first module of each, below systems.kernels.flash_attention, has it in its table
# IMPLEMENTATIONS. The others are the modules and packages that it uses, of those in this table. To
# add an implementation: one file, a line here, and its module in implementations.py beside it.
ATTENTIONS: dict[str, tuple[str, ...]] = {
    "naive": ("naive",),
    "flash_pytorch": ("flash_pytorch",),
    "flash_triton": ("triton.attention", "triton", "autograd"),
    "flash_hopper": ("hopper.attention", "hopper", "triton", "autograd"),
    "flash_attn_4": ("peers.flash_attn_4",),
    "sdpa": ("peers.sdpa",),
    "flex": ("peers.flex",),
    "sdpa_flash": ("peers.sdpa",),
    "sdpa_cudnn": ("peers.sdpa",),
    "sdpa_efficient": ("peers.sdpa",),
    "sdpa_math": ("peers.sdpa",),
}
