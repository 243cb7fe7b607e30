"""Measure the peak GPU memory of each phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from systems.measure.timing import synchronize
from systems.measure.windows import during


def peak_memory_by_phase(
    phases: Mapping[str, Callable[[], object]], device: torch.device
) -> dict[str, int]:
    """Run phases in order, and return the peak of the allocated GPU memory in each phase.

    The peak is the value of torch.cuda.max_memory_allocated. It includes all live tensors, even
    those created before the phase, with sizes as rounded by torch's allocator. It does not include
    the cache of the allocator, or memory that NCCL and the CUDA context allocate. This function
    resets torch's peak memory statistics.

    Tensors in reference cycles count until Python's garbage collector frees them. Call gc.collect()
    before this function if such tensors may exist.

    The result is {} on a CPU, where no memory is measured.
    """
    peaks = {}
    for name, fn in phases.items():
        synchronize(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with during(name):
            fn()
            synchronize(device)
        if device.type == "cuda":
            peaks[name] = torch.cuda.max_memory_allocated(device)
    return peaks
