"""Measure what the first training steps of a process spend their time on.

Run it on this machine, without Slurm:

    python -m jobs.submit sweeps/warmup.yaml --local --where "benchmark == 'first_steps'"

torch.profiler records the first steps of the process. Its times include its own overhead; the
benchmark `train_step` with `passes: forward_backward` and `warmup_steps: 0` measures the same steps
without a profiler.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from systems import implementation_sources
from systems.benchmark import Sources
from systems.training.params import TransformerParams

if TYPE_CHECKING:
    from systems.training.training import Training

VERSION = 1
PRELOAD = ("torch._dynamo",)
_STEP = "first_steps_step"  # name of the annotated range of a step


class Params(TransformerParams):
    """Parameters of the recorded training. Has all fields of `TransformerParams`."""

    steps: Annotated[int, Field(ge=2)] = 6  # number of recorded steps, from the first one


def sources(params: Params) -> Sources:
    """Return the modules that count for the results of a run with these parameters."""
    return implementation_sources.of_training(params.attention, params.optimizer)


def run(params: Params) -> dict[str, Any]:
    """Record the first forward and backward passes of this process, and check the gradients.

    Facts:
        first_steps: for each step its number (step), and times and counts of
            `systems.measure.profiler.host_calls.host_times`.
        relative_error: errors of the loss and the gradients, see `check_training`.

    Raises:
        WrongOutput: if the error of the loss or of a gradient is above the tolerance.
    """
    import torch

    from systems.check.gradients import check_training
    from systems.measure.profiler.host_calls import host_times
    from systems.measure.profiler.trace import by_category, read_events, span
    from systems.training.training import make_training

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training = make_training(params, device)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        _record(training, params.steps, trace)
        categories = by_category(read_events(trace))
    ranges = [event for event in categories["user_annotation"] if event["name"] == _STEP]
    times = host_times(categories, sorted(span(event) for event in ranges))
    return {
        "facts": {
            "first_steps": [{"step": i, **step} for i, step in enumerate(times, 1)],
            "relative_error": check_training(training),
        }
    }


def _record(training: Training, steps: int, trace: Path) -> None:
    """Run the first steps of the process under torch.profiler, and write a Chrome trace."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU]
    if training.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(steps):
            with torch.profiler.record_function(_STEP):
                training.forward()
                training.backward()
                if training.device.type == "cuda":
                    torch.cuda.synchronize(training.device)
            training.zero_grad()
    profiler.export_chrome_trace(str(trace))
