"""Measure peak GPU memory, phase by phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from systems.measure.timing import synchronize


def peak_memory_by_phase(
    phases: Mapping[str, Callable[[], object]], device: torch.device
) -> dict[str, int]:
    """Run the phases in order; return the peak of allocated bytes in each.

    The value is that of torch.cuda.max_memory_allocated. It counts all live tensors, including
    those created before the phase, with the rounded sizes of torch's allocator. It does not count
    the allocator's cache or memory that NCCL and the CUDA context allocate. Torch's peak statistics
    are reset.

    Tensors in reference cycles count until Python collects them, so call gc.collect() before.

    Args:
        phases: functions to run, by name of the phase.
        device: on a CPU the phases run and nothing is measured.

    Returns:
        Bytes by name of the phase; {} on a CPU.
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
