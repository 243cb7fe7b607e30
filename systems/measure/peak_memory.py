"""Measure the peak GPU memory of each phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from systems.measure.timing import synchronize
from systems.measure.windows import during


def peak_memory_by_phase(
    phases: Mapping[str, Callable[[], object]], device: torch.device
) -> dict[str, int]:
    """Run phases in order, and return the peak bytes of allocated GPU memory in each; {} on a CPU.

    The peak is that of torch.cuda.max_memory_allocated. It includes all live tensors, even those
    created before the phase, with sizes as rounded by torch's allocator. It does not include the
    cache of the allocator, or memory of NCCL and the CUDA context. torch's peak statistics are
    reset.

    Tensors in reference cycles count until Python's garbage collector frees them. Call gc.collect()
    before this function if such tensors may exist.
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
