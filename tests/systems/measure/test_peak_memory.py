"""Tests of peak memory by phase."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from systems.measure.peak_memory import peak_memory_by_phase
from systems.measure.windows import failed_phase, forget


def test_a_failure_names_its_phase():
    forget()
    with pytest.raises(RuntimeError):
        too_large = partial(torch.empty, 2**60)
        peak_memory_by_phase({"forward": int, "backward": too_large}, torch.device("cpu"))
    assert failed_phase() == "backward"


@pytest.mark.gpu
def test_peak_memory_counts_what_a_call_allocates():
    device = torch.device("cuda")
    held = torch.empty(1 << 26, dtype=torch.uint8, device=device)
    before = torch.cuda.memory_allocated(device)
    phases = {
        f"{size} bytes": partial(torch.empty, size, dtype=torch.uint8, device=device)
        for size in (1 << 28, 1 << 27)
    }
    peaks = peak_memory_by_phase(phases, device)
    assert list(peaks.values()) == [before + (1 << 28), before + (1 << 27)]
    assert before >= held.numel()
