"""Measure the peak of GPU memory, phase by phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from systems.measure.timing import synchronize


def peak_memory_by_phase(
    phases: Mapping[str, Callable[[], object]], device: torch.device
) -> dict[str, int]:
    """Run the phases in order; return for each the most bytes that were allocated while it ran.

    Counts as torch.cuda.max_memory_allocated does: all live tensors, those made before the phase
    included, in the sizes that torch's allocator rounds them up to. Its cache is not counted, nor
    what others take from the driver (NCCL, a CUDA context). Resets torch's peak statistics.
    Garbage that Python has yet to collect counts as live: call gc.collect() before.

    Returns:
        Bytes by name; nothing on a CPU, where the phases only run.
    """
    peaks = {}
    for name, fn in phases.items():
        synchronize(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        fn()
        synchronize(device)
        if device.type == "cuda":
            peaks[name] = torch.cuda.max_memory_allocated(device)
    return peaks
