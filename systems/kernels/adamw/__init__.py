"""Fused AdamW in Triton: float32, 16-bit weights with float32 master weights, or pure bfloat16."""

from systems.kernels.adamw.launch import fused_adamw
from systems.kernels.adamw.optimizer import FusedAdamW
from systems.kernels.adamw.reference import adamw_reference

__all__ = ["FusedAdamW", "adamw_reference", "fused_adamw"]
