"""AdamW in one pass over memory: float32, 16-bit with master weights, or bfloat16 throughout."""

from systems.kernels.adamw.launch import fused_adamw
from systems.kernels.adamw.optimizer import FusedAdamW
from systems.kernels.adamw.reference import adamw_reference

__all__ = ["FusedAdamW", "adamw_reference", "fused_adamw"]
