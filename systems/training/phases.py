"""Time training steps, either phase by phase or as a whole.

The phases of a step are forward, backward and optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch

from systems.accounting import Phase
from systems.measure.timing import clock_ms
from systems.measure.windows import during, window
from systems.training.training import Training

LEAST_MS = 1200.0  # NVML's counter of energy needs at least a second
Phases = dict[str, Callable[[], None]]


def phases_of(training: Training, passes: Phase = "train_step") -> Phases:
    """Return the methods of the phases of a step by name, in their order."""
    phases = {
        "forward": training.forward,
        "backward": training.backward,
        "optimizer": training.optimizer_step,
    }
    count = {"forward": 1, "forward_backward": 2, "train_step": 3}[passes]
    return dict(list(phases.items())[:count])


def timed_steps(
    training: Training, phases: Phases, count: int, warmup_steps: int = 0
) -> Iterator[dict[str, float]]:
    """Run `count` steps, and yield the milliseconds of each phase after each step.

    They are yielded when the gradients of the step are already freed. Windows, see
    `systems.measure.windows`, are noted only after the first warmup_steps.
    """
    for step in range(count):
        times = {}
        for name, fn in phases.items():
            with during(name), window(None if step < warmup_steps else name):
                times[name] = clock_ms(fn, training.device)
        training.zero_grad()
        yield times


def by_phase(steps: list[dict[str, float]]) -> dict[str, list[float]]:
    """Return the times of each phase, and with a backward also their sum forward_backward."""
    samples = {name: [times[name] for times in steps] for name in steps[0]}
    if "backward" in samples:
        both = zip(samples["forward"], samples["backward"], strict=True)
        samples["forward_backward"] = [f + b for f, b in both]
    return samples


def steps_ms(training: Training, count: int) -> tuple[list[float], int]:
    """Return the milliseconds of `count` consecutive steps, and how many steps the window has.

    On a GPU, the host does not wait for the GPU between steps. The time of a step is then measured
    from the end of the previous step. There are more than `count` steps if these take less than
    `LEAST_MS`, so that their energy can be measured. The window also has one step without a sample.
    """
    on_gpu = training.device.type == "cuda"
    if on_gpu:  # which is idle afterwards, so the energy in the window is only that of its steps
        count = max(count, math.ceil(LEAST_MS / min(_steps_ms(training, 3))))
    with during("train_step"), window("train_step"):
        if on_gpu:
            training.step()  # so that the host is ahead of the GPU when the first sample starts
        return _steps_ms(training, count), count + on_gpu


def _steps_ms(training: Training, count: int) -> list[float]:
    if training.device.type != "cuda":
        return [clock_ms(training.step, training.device) for _ in range(count)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    for i, event in enumerate(events):
        if i:
            training.step()
        event.record()
    torch.cuda.synchronize()
    return [round(start.elapsed_time(end), 6) for start, end in pairwise(events)]
