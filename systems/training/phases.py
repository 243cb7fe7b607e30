"""Time training steps, either phase by phase or as a whole.

The phases of a step are forward, backward and optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import torch

from systems.accounting import Phase
from systems.measure.timing import clock_ms
from systems.training.training import Training

Phases = dict[str, Callable[[], None]]


def phases_of(training: Training, passes: Phase = "train_step") -> Phases:
    """Return the phases of a training step in order: name, and the method that runs the phase.

    Args:
        training: the training.
        passes: phases to return: forward (forward only), forward_backward (forward and backward) or
            train_step (all three).
    """
    phases = {
        "forward": training.forward,
        "backward": training.backward,
        "optimizer": training.optimizer_step,
    }
    count = {"forward": 1, "forward_backward": 2, "train_step": 3}[passes]
    return dict(list(phases.items())[:count])


def timed_steps(training: Training, phases: Phases, count: int) -> Iterator[dict[str, float]]:
    """Run `count` steps phase by phase, and time each phase with Python's clock.

    Yields:
        After each step: milliseconds by phase. The gradients of the step are already freed.
    """
    for _ in range(count):
        times = {name: clock_ms(fn, training.device) for name, fn in phases.items()}
        training.zero_grad()
        yield times


def by_phase(steps: list[dict[str, float]]) -> dict[str, list[float]]:
    """Group the times of several steps by phase.

    Args:
        steps: milliseconds by phase, for each step.

    Returns:
        Milliseconds of all steps, for each phase. If backward is one of the phases, there is also
        forward_backward, the sum of forward and backward.
    """
    samples = {name: [times[name] for times in steps] for name in steps[0]}
    if "backward" in samples:
        both = zip(samples["forward"], samples["backward"], strict=True)
        samples["forward_backward"] = [f + b for f, b in both]
    return samples


def steps_ms(training: Training, count: int) -> list[float]:
    """Run consecutive steps and return the time of each step, in milliseconds.

    The time of a step is measured from the end of the previous step. On a GPU the host does not
    wait for the GPU between steps.
    """
    if training.device.type != "cuda":
        return [clock_ms(training.step, training.device) for _ in range(count)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    training.step()  # so that the host is already ahead of the GPU when the first sample starts
    for i, event in enumerate(events):
        if i:
            training.step()
        event.record()
    torch.cuda.synchronize()
    return [round(start.elapsed_time(end), 6) for start, end in pairwise(events)]
