"""Fused AdamW in Triton, with optional float32 master weights or bfloat16 optimizer state."""

from systems.kernels.adamw.optimizer import FusedAdamW

__all__ = ["FusedAdamW"]
