"""Sizes of dtypes, and the dtype of matrix products, by the names that parameters use."""

from __future__ import annotations

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4}  # as stored; tf32 is a float32
# The dtype that matrices are multiplied in, by the precision of a training.
MATMUL_DTYPE = {
    "fp32": "fp32", "tf32": "tf32", "bf16": "bf16", "fp16": "fp16",
    "bf16_pure": "bf16", "bf16_master": "bf16",
}  # fmt: skip
