"""Peak FLOP/s, memory and link bandwidth of devices, from their datasheets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class _Device:
    """Figures from the datasheet of one device.

    flops: dense peaks in FLOP/s; bf16, fp16 and tf32 on tensor cores, fp32 outside them.
    link: bytes/s that it can send to its peers; of a GPU over all its NVLinks, of a TPU over one
        axis of the torus, both ways round.
    """

    flops: dict[str, float]
    memory: float  # bytes
    link: float | None = None


_HOPPER = {"bf16": 989.4e12, "fp16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12}
_AMPERE = {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12}

# By the name nvidia-smi shows. Sources: NVIDIA H100, H200 and A100 Tensor Core GPU datasheets and
# NVIDIA DGX B200 datasheet (eight GPUs: 72 PFLOP/s of FP8, twice its BF16; 1,440 GB). They print
# tensor rates with sparsity, twice these, and NVLink both directions together, twice these. An
# H100 PCIe has NVLink only where a bridge joins two of them. TPU v5p: Google Cloud, "TPU v5p", for
# FLOP/s and memory; the axis is Austin et al. 2025, How to Scale Your Model, part 2, 9e10 B/s each
# way. Google's own 1200 GB/s a chip, both directions of six links, would make it 1e11.
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
    """Return the peak FLOP/s of a device by its datasheet, or None if unknown."""
    device = _DEVICES.get(gpu_name or "")
    return device.flops.get(dtype) if device else None


def link_bandwidth(device_name: str | None) -> float | None:
    """Return the bytes/s a device can send to its peers, or None if unknown: of a GPU over all its
    NVLinks, within one NVLink domain; of a TPU over one axis of its torus, both ways round."""
    device = _DEVICES.get(device_name or "")
    return device.link if device else None


def memory_bytes(device_name: str | None) -> float | None:
    """Return the memory of a device by its datasheet (GB = 10^9 bytes), or None if unknown."""
    device = _DEVICES.get(device_name or "")
    return device.memory if device else None
