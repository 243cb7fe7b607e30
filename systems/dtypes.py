"""TORCH_DTYPES: torch dtypes by the names that parameters of benchmarks use, such as "bf16"."""

from __future__ import annotations

import torch

# tf32 is stored as float32. Sizes are in `systems.accounting.DTYPE_BYTES`, which does not import
# torch.
TORCH_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "tf32": torch.float32,
}
