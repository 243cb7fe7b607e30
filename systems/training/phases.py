"""Time training steps phase by phase with Python's clock, or as whole consecutive steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch

from systems.accounting import Phase
from systems.measure.timing import clock_ms
from systems.training.training import Training

Phases = dict[str, Callable[[], None]]


def phases_of(training: Training, passes: Phase = "train_step") -> Phases:
    """Return the functions of the phases that belong to `passes`, in order, by name."""
    phases = {
        "forward": training.forward,
        "backward": training.backward,
        "optimizer": training.optimizer_step,
    }
    count = {"forward": 1, "forward_backward": 2, "train_step": 3}[passes]
    return dict(list(phases.items())[:count])


def timed_steps(training: Training, phases: Phases, count: int) -> Iterator[dict[str, float]]:
    """Run `count` steps; yield the milliseconds of each phase after freeing the gradients."""
    for _ in range(count):
        times = {name: clock_ms(fn, training.device) for name, fn in phases.items()}
        training.zero_grad()
        yield times


def by_phase(steps: list[dict[str, float]]) -> dict[str, list[float]]:
    """Return the samples of each phase, and their sum for forward and backward."""
    samples = {name: [times[name] for times in steps] for name in steps[0]}
    if "backward" in samples:
        both = zip(samples["forward"], samples["backward"], strict=True)
        samples["forward_backward"] = [f + b for f, b in both]
    return samples


def steps_ms(training: Training, count: int) -> list[float]:
    """Time consecutive steps; return milliseconds from the end of one to the end of the next."""
    if training.device.type != "cuda":
        return [clock_ms(training.step, training.device) for _ in range(count)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    training.step()  # so that the host is ahead of the GPU in the first sample, too
    for i, event in enumerate(events):
        if i:
            training.step()
        event.record()
    torch.cuda.synchronize()
    return [round(start.elapsed_time(end), 6) for start, end in pairwise(events)]
