"""What GPUs can reach by their datasheets, and the sizes of dtypes."""

from __future__ import annotations

DTYPE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
# What matrices are multiplied in, by what a training run calls its precision.
MATMUL_DTYPE = {
    "fp32": "fp32", "tf32": "tf32", "bf16": "bf16", "fp16": "fp16",
    "bf16_pure": "bf16", "bf16_master": "bf16",
}  # fmt: skip

# Dense peaks in FLOP/s, by the name nvidia-smi shows. bf16, fp16 and tf32 on tensor cores without
# sparsity; fp32 outside them. Sources: NVIDIA H100, H200 and A100 Tensor Core GPU datasheets (which
# print tensor rates with sparsity, twice these).
_PEAK_FLOPS: dict[str, dict[str, float]] = {
    "NVIDIA H100 80GB HBM3": {
        "bf16": 989.4e12,
        "fp16": 989.4e12,
        "tf32": 494.7e12,
        "fp32": 66.9e12,
    },
    "NVIDIA H100 PCIe": {"bf16": 756e12, "fp16": 756e12, "tf32": 378e12, "fp32": 51.2e12},
    "NVIDIA H200": {"bf16": 989.4e12, "fp16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12},
    "NVIDIA A100-SXM4-40GB": {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12},
    "NVIDIA A100-SXM4-80GB": {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12},
}


def peak_flops(gpu_name: str | None, dtype: str) -> float | None:
    """FLOP/s a GPU can reach by its datasheet, or None where it is not known."""
    return _PEAK_FLOPS.get(gpu_name or "", {}).get(dtype)
