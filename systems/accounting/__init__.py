"""The arithmetic behind the tables: FLOPs, bytes, memory, communication, hardware peaks. No torch.

Every function is pure; what is not known (a GPU that is not listed) is None, never a guess.
"""

from systems.accounting.attention import attention_bytes, attention_flops
from systems.accounting.communication import all_reduce_bus_bytes
from systems.accounting.hardware import DTYPE_BYTES, peak_flops

__all__ = [
    "DTYPE_BYTES",
    "all_reduce_bus_bytes",
    "attention_bytes",
    "attention_flops",
    "peak_flops",
]
