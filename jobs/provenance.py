"""Provenance of a measurement: package versions, CPU, and the state of the GPUs.

This module neither imports torch nor initializes CUDA. It queries GPUs through NVML. Without NVML,
it asks nvidia-smi for the number and the name of the GPUs.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

# Includes this project, because in a wheel installation only its version identifies the code.
PACKAGES = ("cluster-sweeps", "torch", "triton", "numpy", "submitit")


def packages() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that affect a measurement.

    The versions are read from package metadata, without importing the packages. None means that
    the package is not installed.
    """
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


@cache
def processor() -> str:
    """Return the model name of the CPU."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@cache
def boot_id() -> str | None:
    """Return the id that the kernel of this host chose when it booted. None if it is unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() or None
    except OSError:
        return None


def cpu_device() -> str:
    """Return the `device` field for records of CPU runs, for example "cpu: AMD EPYC 9654"."""
    return f"cpu: {processor()}"


@cache
def _nvml() -> Any:
    """Return the initialized pynvml module, or None if the package or the driver is missing."""
    try:
        import pynvml  # type: ignore[import-untyped]

        pynvml.nvmlInit()
    except Exception:  # no package, no driver or no permission
        return None
    return pynvml


def visible_gpus() -> list[str]:
    """Return the indices or UUIDs of the GPUs that this process may use.

    If CUDA_VISIBLE_DEVICES is set, these are its entries up to the first invalid entry, as in CUDA.
    Otherwise these are the indices of all GPUs of the host.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        tokens = [token.strip() for token in given.split(",")]
        # CUDA ignores everything from the first invalid entry on.
        kept: list[str] = []
        for token in tokens:
            if not token or (token.isdigit() and int(token) >= _gpu_count()) or token[0] == "-":
                break
            kept.append(token)
        return kept if _gpu_count() else []
    return [str(i) for i in range(_gpu_count())]


@cache
def _gpu_count() -> int:
    nvml = _nvml()
    if nvml is not None:
        return int(nvml.nvmlDeviceGetCount())
    return sum(line.startswith("GPU ") for line in _nvidia_smi("-L").splitlines())


def _nvidia_smi(*arguments: str) -> str:
    """Return the output of nvidia-smi, which comes with the driver, as NVML's package is optional.

    It is empty if nvidia-smi fails.
    """
    try:
        done = subprocess.run(
            ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if done.returncode else done.stdout


def _ask(handle: Any, question: str, *arguments: Any) -> Any:
    """Return what NVML answers to a question about a GPU, or None if it gives no answer."""
    nvml = _nvml()
    try:
        return getattr(nvml, question)(handle, *arguments)
    except (nvml.NVMLError, AttributeError):
        return None


def _scaled(value: int | None) -> float | None:
    """Return milliwatts in watts, or millijoules in joules."""
    return None if value is None else value / 1e3


def gpu_states(tokens: list[str]) -> list[dict[str, Any]]:
    """Return name, UUID, SM clock, power, temperature and throttle reasons of each GPU.

    Tokens are GPU indices or UUIDs, as in CUDA_VISIBLE_DEVICES. A value is None if NVML cannot
    report it. GPUs that NVML does not find are left out. The list is empty if NVML is not
    available.
    """
    return [
        {
            "name": _ask(handle, "nvmlDeviceGetName"),
            "uuid": _ask(handle, "nvmlDeviceGetUUID"),
            "sm_clock_mhz": reading.sm_clock_mhz,
            "power_w": reading.power_w,
            "temperature_c": reading.temperature_c,
            "throttle_reasons": _ask(handle, _THROTTLE),
        }
        for handle, reading in zip(_handles(tuple(tokens)), read_gpus(tokens), strict=True)
    ]


@cache
def _handles(tokens: tuple[str, ...]) -> list[Any]:
    """Return NVML's handles of GPUs, given by indices or UUIDs. Unknown GPUs are left out."""
    nvml = _nvml()
    handles = []
    for token in tokens if nvml is not None else ():
        by_index = token.isdigit()
        find = "nvmlDeviceGetHandleByIndex" if by_index else "nvmlDeviceGetHandleByUUID"
        handles.append(_ask(int(token) if by_index else token, find))
    return [handle for handle in handles if handle is not None]


@dataclass(frozen=True, slots=True)
class GpuReading:
    """State of one GPU at one moment. None means that NVML does not report the value."""

    sm_clock_mhz: int | None
    memory_clock_mhz: int | None
    power_w: float | None
    temperature_c: int | None
    energy_j: float | None  # since the driver was loaded
    throttle: frozenset[str]  # reasons that slow the GPU down, names in THROTTLE_REASONS


# Names of the bits of NVML's throttle reasons. An idle GPU, and clocks that an application chose,
# are not among them.
THROTTLE_REASONS = {
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x20: "sw_thermal_slowdown",
    0x40: "hw_thermal_slowdown",
    0x80: "hw_power_brake",
}


_THROTTLE = "nvmlDeviceGetCurrentClocksThrottleReasons"


def read_gpus(tokens: list[str]) -> list[GpuReading]:
    """Return the state of each GPU, by indices or UUIDs. Takes about a millisecond a GPU."""
    nvml = _nvml()
    readings = []
    for handle in _handles(tuple(tokens)):
        bits = _ask(handle, _THROTTLE) or 0
        readings.append(
            GpuReading(
                sm_clock_mhz=_ask(handle, "nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
                memory_clock_mhz=_ask(handle, "nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
                power_w=_scaled(_ask(handle, "nvmlDeviceGetPowerUsage")),
                temperature_c=_ask(handle, "nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
                energy_j=_scaled(_ask(handle, "nvmlDeviceGetTotalEnergyConsumption")),
                throttle=frozenset(name for bit, name in THROTTLE_REASONS.items() if bits & bit),
            )
        )
    return readings


def driver_version() -> str | None:
    nvml = _nvml()
    try:
        return str(nvml.nvmlSystemGetDriverVersion()) if nvml is not None else None
    except nvml.NVMLError:
        return None


def device_kind(tokens: list[str]) -> str:
    """Return the name of the first given GPU, for the field `device` of records.

    Tokens are GPU indices or UUIDs. An unknown name is "GPU". Without tokens, the run is on the
    CPU, and the result is "cpu: " and its name.
    """
    if not tokens:
        return cpu_device()
    states = gpu_states(tokens[:1])
    if states and states[0]["name"]:
        return str(states[0]["name"])
    name = _nvidia_smi("--query-gpu=name", "--format=csv,noheader", "-i", tokens[0])
    return name.strip() or "GPU"
