"""Provenance of a measurement: package versions, CPU, and names and state of the GPUs.

This module neither imports torch nor initializes CUDA. It queries GPUs through NVML.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import pynvml  # type: ignore[import-untyped]

# Includes this project, because in a wheel installation only its version identifies the code.
PACKAGES = ("cluster-sweeps", "torch", "triton", "numpy", "submitit")


def packages() -> dict[str, str | None]:
    """Return the versions of Python and of the PACKAGES. None: not installed."""
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
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cpu_device() -> str:
    """Return the `device` field for records of CPU runs, for example "cpu: AMD EPYC 9654"."""
    return f"cpu: {processor()}"


def visible_gpus() -> list[str]:
    """Return the indices or UUIDs of the GPUs that this process may use.

    If CUDA_VISIBLE_DEVICES is set, these are its entries up to the first invalid one, as in CUDA,
    each once.
    """
    count = _ask("nvmlDeviceGetCount") or 0
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None or not count:
        return [str(i) for i in range(count)]

    def is_valid(token: str) -> bool:
        return bool(token) and token[0] != "-" and not (token.isdigit() and int(token) >= count)

    return list(dict.fromkeys(takewhile(is_valid, map(str.strip, given.split(",")))))


@cache
def _has_nvml() -> bool:
    """Initialize NVML, and return whether there are a driver and the permission to use it."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return False
    return True


def _ask(question: str, *arguments: Any) -> Any:
    """Return what NVML answers to a question, or None if it gives no answer."""
    try:
        return getattr(pynvml, question)(*arguments) if _has_nvml() else None
    except (pynvml.NVMLError, AttributeError):
        return None


def _scaled(value: int | None) -> float | None:
    """Return milliwatts in watts, or millijoules in joules."""
    return None if value is None else value / 1e3


def gpu_names(tokens: list[str]) -> list[dict[str, Any]]:
    """Return name and UUID of each GPU, None if NVML does not report them.

    Tokens are as in CUDA_VISIBLE_DEVICES. GPUs that NVML does not find are left out.
    """
    return [
        {"name": _ask("nvmlDeviceGetName", handle), "uuid": _ask("nvmlDeviceGetUUID", handle)}
        for handle in _handles(tuple(tokens))
    ]


@cache
def _handles(tokens: tuple[str, ...]) -> list[Any]:
    """Return NVML's handles of GPUs, given by indices or UUIDs. Unknown GPUs are left out."""
    handles = []
    for token in tokens:
        by_index = token.isdigit()
        find = "nvmlDeviceGetHandleByIndex" if by_index else "nvmlDeviceGetHandleByUUID"
        handles.append(_ask(find, int(token) if by_index else token))
    return [handle for handle in handles if handle is not None]


def gpu_uuid(token: str) -> str:
    """Return the UUID of a GPU that is given by its index or UUID; the token if it is unknown."""
    uuids = [_ask("nvmlDeviceGetUUID", handle) for handle in _handles((token,))]
    return str(next(filter(None, uuids), token))


@dataclass(frozen=True, slots=True)
class GpuReading:
    """State of one GPU at one moment. None means that NVML does not report the value."""

    sm_clock_mhz: int | None
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


def read_gpus(tokens: list[str]) -> list[GpuReading]:
    """Return the state of each GPU, by indices or UUIDs. Takes about a millisecond a GPU."""
    readings = []
    for handle in _handles(tuple(tokens)):
        bits = _ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0
        readings.append(
            GpuReading(
                sm_clock_mhz=_ask("nvmlDeviceGetClockInfo", handle, pynvml.NVML_CLOCK_SM),
                power_w=_scaled(_ask("nvmlDeviceGetPowerUsage", handle)),
                temperature_c=_ask("nvmlDeviceGetTemperature", handle, pynvml.NVML_TEMPERATURE_GPU),
                energy_j=_scaled(_ask("nvmlDeviceGetTotalEnergyConsumption", handle)),
                throttle=frozenset(name for bit, name in THROTTLE_REASONS.items() if bits & bit),
            )
        )
    return readings


def driver_version() -> str | None:
    version = _ask("nvmlSystemGetDriverVersion")
    return None if version is None else str(version)


def device_kind(tokens: list[str]) -> str:
    """Return the field `device` of records: the first GPU's name, or the CPU's without any."""
    if not tokens:
        return cpu_device()
    names = [gpu["name"] for gpu in gpu_names(tokens[:1])]
    return str(next(filter(None, names), "GPU"))
