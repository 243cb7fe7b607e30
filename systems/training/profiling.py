"""Set up torch.profiler for training steps, and annotate ranges for it and Nsight Systems."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from systems.kernels.flash_attention import masked_scores
from systems.measure.kernel_table import ATTENTION_RANGES
from systems.measure.timing import clock_ms
from systems.model import TransformerBlock
from systems.training.params import TransformerParams
from systems.training.phases import Phases
from systems.training.training import Training

_SCORES, _SOFTMAX, _OUTPUT = ATTENTION_RANGES


def step_profiler(device: torch.device, trace: Path, steps: int) -> torch.profiler.profile:
    """Return a profiler that discards one step, records `steps` steps and writes a Chrome trace.

    Call its `step()` after each step.
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
    """Annotate a range for torch.profiler (record_function) and for nsys (NVTX)."""
    nvtx = torch.cuda.nvtx.range(name) if torch.cuda.is_available() else contextlib.nullcontext()
    with nvtx, torch.profiler.record_function(name):
        yield


def annotated_naive(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """Compute `systems.kernels.flash_attention.naive`, with each of its three parts in a range."""
    with annotated(_SCORES):
        scores = masked_scores(q, k, is_causal)
    with annotated(_SOFTMAX):
        probabilities = torch.softmax(scores, dim=-1)
    with annotated(_OUTPUT):
        return probabilities @ v


def has_attention_ranges(params: TransformerParams) -> bool:
    """Return True if the parts of attention can be annotated.

    Fused attention has no separate parts, compiled code and replayed graphs skip Python
    annotations, and recomputation in backward would be counted as forward.
    """
    eager = params.mode == "eager" and not params.cuda_graph
    return params.attention == "naive" and eager and params.checkpointing == "none"


def annotate_attention(training: Training) -> None:
    """Annotate the attention of all blocks, if `has_attention_ranges`."""
    if has_attention_ranges(training.params):
        for block in training.model.blocks:
            assert isinstance(block, TransformerBlock)
            block.attention.attention = annotated_naive


def annotated_step(training: Training, phases: Phases) -> dict[str, float]:
    """Run one step with each phase in a range; return the milliseconds of each phase.

    The GPU is idle at both ends of a range, so all GPU work in a range belongs to its phase.
    """
    times = {}
    for name, fn in phases.items():
        with annotated(name):
            times[name] = clock_ms(fn, training.device)
    training.zero_grad()
    return times
