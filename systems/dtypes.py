"""torch dtypes by the names that sweeps use."""

from __future__ import annotations

import torch

# tf32 is stored as float32. `systems.accounting.DTYPE_BYTES` has sizes, without importing torch.
TORCH_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "tf32": torch.float32,
}
