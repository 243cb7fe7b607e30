"""Profile training steps: configure torch.profiler, and annotate phases and parts of attention."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from systems.kernels.flash_attention.call import Call
from systems.kernels.flash_attention.naive import masked_scores
from systems.measure.profiler.kernel_table import ATTENTION_RANGES
from systems.measure.timing import clock_ms
from systems.model import TransformerBlock
from systems.training.params import TransformerParams
from systems.training.phases import Phases
from systems.training.training import Training

_SCORES, _SOFTMAX, _OUTPUT = ATTENTION_RANGES


def step_profiler(device: torch.device, trace: Path, steps: int) -> torch.profiler.profile:
    """Return a torch.profiler that writes a Chrome trace of training steps.

    Call its method `step` after each step. The first step is discarded, because it includes the
    start of the profiler.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=steps, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(trace)),
    )


@contextlib.contextmanager
def annotated(name: str) -> Iterator[None]:
    """Name the code in a `with` block, for torch.profiler (record_function) and nsys (NVTX)."""
    nvtx = torch.cuda.nvtx.range(name) if torch.cuda.is_available() else contextlib.nullcontext()
    with nvtx, torch.profiler.record_function(name):
        yield


def annotated_naive(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """Compute attention like `naive`, with annotated ranges for scores, softmax and output."""
    with annotated(_SCORES):
        scores = masked_scores(q, k, Call(is_causal))
    with annotated(_SOFTMAX):
        probabilities = torch.softmax(scores, dim=-1)
    with annotated(_OUTPUT):
        return probabilities @ v


def has_attention_ranges(params: TransformerParams) -> bool:
    """Return whether scores, softmax and output of attention can be annotated separately.

    Only naive attention has these parts. Compiled code and replayed CUDA graphs skip annotations in
    Python. With activation checkpointing, backward runs the annotated code again, and its
    operations would be counted, too.
    """
    eager = params.mode == "eager" and not params.cuda_graph
    return params.attention == "naive" and eager and params.checkpointing == "none"


def annotate_attention(training: Training) -> None:
    """Annotate scores, softmax and output of attention, if `has_attention_ranges`."""
    if has_attention_ranges(training.params):
        for block in training.model.blocks:
            assert isinstance(block, TransformerBlock)
            block.attention.attention = annotated_naive


def annotated_step(training: Training, phases: Phases) -> dict[str, float]:
    """Run one step with a range for each phase, which a profiler shows; return their milliseconds.

    The GPU is idle at the start and at the end of each range. So all GPU work during a range
    belongs to its phase.
    """
    times = {}
    for name, fn in phases.items():
        with annotated(name):
            times[name] = clock_ms(fn, training.device)
    training.zero_grad()
    return times
