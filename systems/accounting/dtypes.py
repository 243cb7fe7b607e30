"""Size of each dtype and the dtype of matmuls in each precision, by their names in sweeps."""

from __future__ import annotations

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4}  # in memory: tf32 is stored as float32
# Dtype of the inputs of matmuls, by the precision of training.
MATMUL_DTYPE = {
    "fp32": "fp32", "tf32": "tf32", "bf16": "bf16", "fp16": "fp16",
    "bf16_pure": "bf16", "bf16_master": "bf16",
}  # fmt: skip
