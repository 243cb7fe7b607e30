"""Properties of a tensor's device, and a context manager that makes it the current device."""

from __future__ import annotations

import contextlib
import functools
import os

import torch

_NOTHING = contextlib.nullcontext()


def runs_kernels(device: torch.device) -> bool:
    """Return whether Triton kernels run on a device: a GPU, or a CPU with TRITON_INTERPRET=1."""
    if device.type == "cuda":
        return True
    if not os.environ.get("TRITON_INTERPRET"):
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def is_hopper(device: torch.device) -> bool:
    """Return True for an NVIDIA GPU of compute capability 9.0, such as an H100 or H200."""
    if device.type != "cuda" or torch.version.hip is not None:  # AMD's MI200 also reports 9.0
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which `device` is current, where Triton launches."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


def current_stream(device: torch.device) -> int:
    """Return the number of the current stream of a GPU, or 0 for a CPU."""
    return torch._C._cuda_getCurrentRawStream(device.index) if device.type == "cuda" else 0


@functools.cache
def multiprocessors(index: int) -> int:
    """Return the number of multiprocessors of the GPU with this index (132 for an H200)."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
