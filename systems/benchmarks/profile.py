"""Measure the time of each kernel in a training step, by phase and by part of attention.

Run it on this machine, without Slurm:

    python -m jobs.submit sweeps/profile.yaml --local

Training steps are first timed without a profiler. Then some steps are run under torch.profiler,
which gives the times of kernels.
"""

from __future__ import annotations

import gzip
import shutil
import statistics
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, model_validator

from systems import accounting, implementation_sources
from systems.benchmark import Sources, artifacts_folder
from systems.training.params import TransformerParams

if TYPE_CHECKING:
    from systems.measure.profiler.kernel_table import Profile
    from systems.training.training import Training

VERSION = 1
PRELOAD = ("torch._dynamo",)
# Number of profiled steps. A few are enough because all steps are alike, and each step adds
# megabytes to the trace.
PROFILED_STEPS = 3
TRACE = "trace.json.gz"  # file name of the artifact


class Params(TransformerParams):
    """Parameters of the profiled training step. Has all fields of `TransformerParams`."""

    # Whether to keep the trace of torch.profiler as an artifact, which https://ui.perfetto.dev
    # displays.
    trace: bool = False
    warmup_steps: Annotated[int, Field(ge=0)] = 5  # number of steps before the first sample
    # Number of steps that are timed phase by phase without a profiler. The same number of further
    # steps is timed as a whole.
    measure_steps: Annotated[int, Field(ge=1)] = 10

    @model_validator(mode="before")
    @classmethod
    def _without_profiler(cls, given: Any) -> Any:
        """Leave out `profiler: torch`, a parameter that recorded runs have; ids stay the same."""
        if isinstance(given, dict) and given.get("profiler") == "torch":
            return {name: value for name, value in given.items() if name != "profiler"}
        return given


def sources(params: Params) -> Sources:
    """Return the modules that count for the results of a run with these parameters."""
    return implementation_sources.of_training(params.attention, params.optimizer)


def predict(params: Params) -> dict[str, Any]:
    """Predict the ratio of operations of softmax to FLOPs of the matmuls of attention."""
    size = params.model_size
    head_dim = size.d_model // size.num_heads
    return {
        "softmax_over_matmul_flops": {
            phase: accounting.softmax_over_matmul_flops(phase, head_dim)
            for phase in ("forward", "backward")
        }
    }


def run(params: Params) -> dict[str, Any]:
    """Time training steps without a profiler, profile further steps, and check the gradients.

    Phases:
        forward, backward, forward_backward, optimizer, train_step: as in the benchmark
            `train_step`, without a profiler.

    Facts:
        profiled_steps: number of profiled steps.
        range_ms: mean milliseconds of each phase and of the whole step under the profiler.
        range_over_clock: time of each phase under the profiler over its median without the
            profiler.
        relative_error: errors of the loss and the gradients, see `check_training`.
        kernels, kernel_ms and so on: times of kernels, see `kernel_table.kernel_facts`.
        kernels_over_clock: time of all kernels of each phase over its median without the profiler.
        trace: file name of the trace, if `params.trace` is true.

    Raises:
        Unsupported: if this machine does not support the parameters.
        WrongOutput: if the error of the loss or of a gradient is above the tolerance.
    """
    import torch

    from systems.check.gradients import check_training
    from systems.training.phases import by_phase, phases_of, steps_ms, timed_steps
    from systems.training.training import make_training

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training = make_training(params, device)
    phases = phases_of(training)
    count = params.warmup_steps + params.measure_steps
    steps = list(timed_steps(training, phases, count, params.warmup_steps))
    samples = by_phase(steps[params.warmup_steps :])
    samples["train_step"], _ = steps_ms(training, params.measure_steps)
    facts = _torch_facts(training, params)
    errors = check_training(training)
    return {
        "samples_ms": samples,
        **params.counts(samples),
        "facts": {**facts, **_over_clock(facts, samples), "relative_error": errors},
    }


def _torch_facts(training: Training, params: Params) -> dict[str, Any]:
    from systems.measure.profiler.kernel_table import kernel_facts, read_profile

    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder, "trace.json")
        _profile(training, trace)
        profile: Profile = read_profile(trace)
        artifact = {}
        if params.trace:
            with trace.open("rb") as raw, gzip.open(artifacts_folder() / TRACE, "wb") as packed:
                shutil.copyfileobj(raw, packed)
            artifact["trace"] = TRACE
    return kernel_facts(profile) | artifact


def _profile(training: Training, trace: Path) -> None:
    from systems.training.phases import phases_of
    from systems.training.profiling import annotate_attention, annotated_step, step_profiler

    annotate_attention(training)  # not earlier: steps without a profiler run without annotations
    phases = phases_of(training)
    with step_profiler(training.device, trace, PROFILED_STEPS) as profiler:
        for _ in range(1 + PROFILED_STEPS):
            annotated_step(training, phases)
            profiler.step()


def _over_clock(facts: dict[str, Any], samples: dict[str, list[float]]) -> dict[str, Any]:
    """Return range_over_clock and kernels_over_clock, see `run`.

    The samples, in milliseconds, are those without a profiler.
    """
    clock = {
        name: statistics.median(samples[name]) for name in ("forward", "backward", "optimizer")
    }
    return {
        name: {phase: facts[key][phase] / ms for phase, ms in clock.items() if phase in facts[key]}
        for name, key in (("range_over_clock", "range_ms"), ("kernels_over_clock", "kernel_ms"))
    }
