"""Devices for Triton kernels: a GPU, or a CPU with Triton's interpreter."""

from __future__ import annotations

import contextlib
import functools
import os

import torch


def runs_kernels(device: torch.device) -> bool:
    """Return True if Triton kernels run on the device: a GPU, or a CPU with TRITON_INTERPRET=1.

    Where they do not, callers use a kernel's reference instead.
    """
    if device.type == "cuda":
        return True
    if not os.environ.get("TRITON_INTERPRET"):
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def is_hopper(device: torch.device) -> bool:
    """Return True for an H100, an H200 or another NVIDIA GPU of compute capability 9.0."""
    if device.type != "cuda" or torch.version.hip is not None:  # AMD's MI200 reports 9.0, too
        return False
    return torch.cuda.get_device_capability(device) == (9, 0)


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make `device` the current one: Triton launches there, not where the tensors are."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


@functools.cache
def multiprocessors(index: int) -> int:
    """Return the number of multiprocessors of the GPU with this index; an H200 has 132."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)
