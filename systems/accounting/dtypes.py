"""Two dicts: bytes per element of each dtype, and matmul input dtype of each training precision.

A training precision is a name such as "bf16" (autocast to bfloat16) or "bf16_master" (bfloat16
weights with float32 master weights).
"""

from __future__ import annotations

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4}  # tf32 is stored as float32
# Training precision -> dtype of the inputs of matmuls.
MATMUL_DTYPE = {
    "fp32": "fp32", "tf32": "tf32", "bf16": "bf16", "fp16": "fp16",
    "bf16_pure": "bf16", "bf16_master": "bf16",
}  # fmt: skip
