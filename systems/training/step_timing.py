"""A training step by Python's clock, phase by phase, and whole steps that follow on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch

from systems.measure.timing import clock_ms
from systems.training.params import Passes
from systems.training.training import Training

Phases = dict[str, Callable[[], None]]


def phases_of(training: Training, passes: Passes = "train_step") -> Phases:
    """What is timed apart, in order."""
    phases = {
        "forward": training.forward,
        "backward": training.backward,
        "optimizer": training.optimizer_step,
    }
    count = {"forward": 1, "forward_backward": 2, "train_step": 3}[passes]
    return dict(list(phases.items())[:count])


def timed_steps(training: Training, phases: Phases, count: int) -> Iterator[dict[str, float]]:
    """Milliseconds of each phase, step by step; gradients are dropped in between."""
    for _ in range(count):
        times = {name: clock_ms(fn, training.device) for name, fn in phases.items()}
        training.zero_grad()
        yield times


def by_phase(steps: list[dict[str, float]]) -> dict[str, list[float]]:
    """The samples of each phase, and of forward and backward together."""
    samples = {name: [times[name] for times in steps] for name in steps[0]}
    if "backward" in samples:
        both = zip(samples["forward"], samples["backward"], strict=True)
        samples["forward_backward"] = [f + b for f, b in both]
    return samples


def steps_ms(training: Training, count: int) -> list[float]:
    """Milliseconds from the end of one step to the end of the next, of steps that follow on."""
    if training.device.type != "cuda":
        return [clock_ms(training.step, training.device) for _ in range(count)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    training.step()  # so that the first sample, too, begins with the host ahead
    for i, event in enumerate(events):
        if i:
            training.step()
        event.record()
    torch.cuda.synchronize()
    return [round(start.elapsed_time(end), 6) for start, end in pairwise(events)]
