"""Peak FLOP/s, memory and link bandwidth of devices, from their datasheets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class _Device:
    """Figures from the datasheet of one device.

    Args:
        flops: dense peak in FLOP/s by dtype: bf16, fp16 and tf32 on tensor cores, fp32 not.
        memory: in bytes.
        link: bytes/s that the device can send to its peers: a GPU over all of its NVLinks, a TPU
            along one axis of its torus, in both directions.
    """

    flops: dict[str, float]
    memory: float
    link: float | None = None


_HOPPER = {"bf16": 989.4e12, "fp16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12}
_AMPERE = {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12}

# GPUs have the names that nvidia-smi shows. Sources: NVIDIA H100, H200 and A100 Tensor Core GPU
# datasheets, and NVIDIA DGX B200 datasheet (eight GPUs: 72 PFLOP/s of FP8, which is twice BF16;
# 1,440 GB). The datasheets give tensor core rates with sparsity and NVLink bandwidth in both
# directions together; both are twice the figures here. H100 PCIe has no link here because it has
# NVLink only where a bridge connects two of them. TPU v5p: FLOP/s and memory from Google Cloud,
# "TPU v5p"; link from Austin et al. 2025, How to Scale Your Model, part 2: 9e10 bytes/s in each
# direction. Google's 1200 GB/s per chip, for six links in both directions, would give 1e11.
_DEVICES = {
    "NVIDIA H100 80GB HBM3": _Device(_HOPPER, 80e9, 450e9),
    "NVIDIA H100 PCIe": _Device(
        {"bf16": 756e12, "fp16": 756e12, "tf32": 378e12, "fp32": 51.2e12}, 80e9
    ),
    "NVIDIA H200": _Device(_HOPPER, 141e9, 450e9),
    "NVIDIA B200": _Device({"bf16": 2250e12, "fp16": 2250e12}, 180e9, 900e9),
    "NVIDIA A100-SXM4-40GB": _Device(_AMPERE, 40e9, 300e9),
    "NVIDIA A100-SXM4-80GB": _Device(_AMPERE, 80e9, 300e9),
    "TPU v5p": _Device({"bf16": 459e12}, 95e9, 2 * 9e10),
}


def peak_flops(gpu_name: str | None, dtype: str) -> float | None:
    """Return the dense peak FLOP/s of a device from its datasheet, or None if unknown."""
    device = _DEVICES.get(gpu_name or "")
    return device.flops.get(dtype) if device else None


def link_bandwidth(device_name: str | None) -> float | None:
    """Return the bytes/s that a device can send to its peers, or None if unknown.

    A GPU sends over all of its NVLinks, within one NVLink domain. A TPU sends along one axis of its
    torus, in both directions.
    """
    device = _DEVICES.get(device_name or "")
    return device.link if device else None


def memory_bytes(device_name: str | None) -> float | None:
    """Return the bytes of memory of a device from its datasheet (GB = 10^9), or None if unknown."""
    device = _DEVICES.get(device_name or "")
    return device.memory if device else None
