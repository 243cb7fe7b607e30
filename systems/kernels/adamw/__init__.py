"""Fused AdamW in Triton, with optional float32 master weights or bfloat16 optimizer state."""

from systems.kernels.adamw.launch import fused_adamw
from systems.kernels.adamw.optimizer import FusedAdamW
from systems.kernels.adamw.reference import adamw_reference

__all__ = ["FusedAdamW", "adamw_reference", "fused_adamw"]
