"""Peak FLOP/s, memory and link bandwidth of devices, from their datasheets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class _Device:
    """Speed and memory of one device, from its datasheet.

    `flops` is the peak FLOP/s without sparsity, by dtype name. On a GPU, bf16, fp16 and tf32 use
    tensor cores, and fp32 does not. `memory` is in bytes. `link` is the number of bytes/s that the
    device can send to other devices, or None if unknown. For a GPU, this is the total of all its
    NVLinks. For a TPU, it is the bandwidth of one axis of the torus, in both directions.
    """

    flops: dict[str, float]
    memory: float
    link: float | None = None


_HOPPER = {"bf16": 989.4e12, "fp16": 989.4e12, "tf32": 494.7e12, "fp32": 66.9e12}
_AMPERE = {"bf16": 312e12, "fp16": 312e12, "tf32": 156e12, "fp32": 19.5e12}

# GPUs have the names that nvidia-smi shows.
#
# Sources for GPUs: NVIDIA H100, H200 and A100 Tensor Core GPU datasheets. The B200 figures are from
# the NVIDIA DGX B200 datasheet, which is for eight GPUs: 72 PFLOP/s in FP8, twice the rate in BF16,
# and 1,440 GB. The datasheets give tensor core rates with sparsity, and NVLink bandwidth as the sum
# of both directions. Both are twice the figures here. H100 PCIe has no link bandwidth here, because
# it has NVLink only if a bridge connects two GPUs.
#
# Sources for TPU v5p: Google Cloud, "TPU v5p", for FLOP/s and memory; Austin et al. 2025, How to
# Scale Your Model, part 2, for the link (9e10 bytes/s in each direction). Google gives 1,200 GB/s
# per chip for six links in both directions, which would be 1e11 bytes/s in each direction.
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
    """Return the peak FLOP/s of a device without sparsity, or None if unknown.

    Names are for example "NVIDIA H200" (as in nvidia-smi) or "TPU v5p", and dtypes "bf16", "fp16",
    "tf32" or "fp32".
    """
    device = _DEVICES.get(gpu_name or "")
    return device.flops.get(dtype) if device else None


def link_bandwidth(device_name: str | None) -> float | None:
    """Return the bytes/s that a device can send to others, see `_Device.link`, or None if unknown.

    For a GPU, this is within one NVLink domain. For names, see `peak_flops`.
    """
    device = _DEVICES.get(device_name or "")
    return device.link if device else None


def memory_bytes(device_name: str | None) -> float | None:
    """Return the size of the memory of a device (see `peak_flops`) in bytes, or None if unknown.

    This is the rounded size of the datasheet. CUDA reports more: in the messages of records that
    ran out of memory, 79.18 GiB (8.50e10 bytes) on an H100 SXM and 139.80 GiB (1.501e11) on an
    H200.
    """
    device = _DEVICES.get(device_name or "")
    return device.memory if device else None
