"""Profile training steps: torch.profiler's set-up, and ranges that it and Nsight Systems show."""

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
    """Return a profiler of `steps` steps, after one that it discards, into a Chrome trace. Call its
    `step()` after each step."""
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
    """Open a range for torch.profiler (record_function) and for nsys (NVTX)."""
    nvtx = torch.cuda.nvtx.range(name) if torch.cuda.is_available() else contextlib.nullcontext()
    with nvtx, torch.profiler.record_function(name):
        yield


def annotated_naive(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """Compute `systems.kernels.flash_attention.naive`, its three parts in a range each."""
    with annotated(_SCORES):
        scores = masked_scores(q, k, is_causal)
    with annotated(_SOFTMAX):
        probabilities = torch.softmax(scores, dim=-1)
    with annotated(_OUTPUT):
        return probabilities @ v


def has_attention_ranges(params: TransformerParams) -> bool:
    """Return True if attention's parts can be annotated: a fused one has none, compiled or replayed
    code skips the Python annotations, and recomputation would count as part of forward."""
    eager = params.mode == "eager" and not params.cuda_graph
    return params.attention == "naive" and eager and params.checkpointing == "none"


def annotate_attention(training: Training) -> None:
    """Annotate the attention of all blocks, if `has_attention_ranges`."""
    if has_attention_ranges(training.params):
        for block in training.model.blocks:
            assert isinstance(block, TransformerBlock)
            block.attention.attention = annotated_naive


def annotated_step(training: Training, phases: Phases) -> dict[str, float]:
    """Run one step, each phase in a range, with the GPU idle at both ends of each, so that all work
    in a range belongs to it. Returns milliseconds by phase."""
    times = {}
    for name, fn in phases.items():
        with annotated(name):
            times[name] = clock_ms(fn, training.device)
    training.zero_grad()
    return times
