"""Measure the time of each kernel in a training step, by phase and by part of attention.

Run it on this machine, without Slurm:

    python -m jobs.submit sweeps/profile.yaml --local

Training steps are first timed without a profiler. Then some steps are run under torch.profiler,
which gives the times of kernels. With `profiler: nsys` they are run under Nsight Systems (nsys)
instead, and the report of nsys is kept. On a GPU, `profiler: nsys` has been run only with the
collector of Nsight Compute 2025.3, which leaves a .qdstrm file instead of a report.
"""

from __future__ import annotations

import gc
import gzip
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from systems import accounting, implementation_sources
from systems.benchmark import Sources, Unsupported, artifacts_folder
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

    # torch: use torch.profiler, which gives tables of kernels.
    # nsys: use Nsight Systems, and keep its report as an artifact. No tables of kernels.
    profiler: Literal["torch", "nsys"] = "torch"
    # Whether to keep the trace of torch.profiler as an artifact, which https://ui.perfetto.dev
    # displays. Needs profiler: torch.
    trace: bool = False
    warmup_steps: Annotated[int, Field(ge=0)] = 5  # number of steps before the first sample
    # Number of steps that are timed phase by phase without a profiler. The same number of further
    # steps is timed as a whole.
    measure_steps: Annotated[int, Field(ge=1)] = 10

    @model_validator(mode="after")
    def _one_trace(self) -> Self:
        if self.trace and self.profiler != "torch":
            raise ValueError(
                f"`trace: true` needs `profiler: torch`, got `profiler: {self.profiler}`; set "
                "`trace: false` (the report of nsys is always kept)"
            )
        return self


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

    Facts if `params.profiler` is "torch":
        kernels, kernel_ms and so on: times of kernels, see `kernel_table.kernel_facts`.
        kernels_over_clock: time of all kernels of each phase over its median without the profiler.
        trace: file name of the trace, if `params.trace` is true.

    Facts if it is "nsys":
        report: file name of the report of nsys, or of its recording (.qdstrm) if the installation
            cannot make a report.

    Raises:
        Unsupported: if this machine does not support the parameters.
        WrongOutput: if the error of the loss or of a gradient is above the tolerance.
    """
    import torch

    from systems.check.gradients import check_training
    from systems.measure.profiler import nsys
    from systems.training.phases import by_phase, phases_of, steps_ms, timed_steps
    from systems.training.training import make_training

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if params.profiler == "nsys":
        reason = nsys.unsupported_reason()
        if reason is not None:
            raise Unsupported(reason)
    training = make_training(params, device)
    phases = phases_of(training)
    count = params.warmup_steps + params.measure_steps
    steps = list(timed_steps(training, phases, count, params.warmup_steps))
    samples = by_phase(steps[params.warmup_steps :])
    samples["train_step"], _ = steps_ms(training, params.measure_steps)
    facts = _torch_facts(training, params) if params.profiler == "torch" else {}
    errors = check_training(training)
    if params.profiler == "nsys":
        del training, phases  # free GPU memory for the process that nsys starts
        gc.collect()
        torch.cuda.empty_cache()
        facts = nsys.run_under_nsys(
            "systems.benchmarks.profile", params.model_dump_json(), artifacts_folder()
        )
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
    """Return range_over_clock and, with kernel_ms, kernels_over_clock, see `run`.

    The samples, in milliseconds, are those without a profiler.
    """
    clock = {
        name: statistics.median(samples[name]) for name in ("forward", "backward", "optimizer")
    }
    return {
        name: {phase: facts[key][phase] / ms for phase, ms in clock.items() if phase in facts[key]}
        for name, key in (("range_over_clock", "range_ms"), ("kernels_over_clock", "kernel_ms"))
        if key in facts
    }


def _steps_under_nsys(params: Params) -> dict[str, Any]:
    """Run the training steps that nsys records, in a process that nsys starts; return facts."""
    import torch

    from systems.training.phases import phases_of
    from systems.training.profiling import annotate_attention, annotated_step
    from systems.training.training import make_training

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    training = make_training(params, device)
    annotate_attention(training)
    phases = phases_of(training)
    for _ in range(max(1, params.warmup_steps)):
        annotated_step(training, phases)
    if device.type == "cuda":
        torch.cuda.profiler.start()
    steps = [annotated_step(training, phases) for _ in range(PROFILED_STEPS)]
    if device.type == "cuda":
        torch.cuda.profiler.stop()
    range_ms = {name: statistics.fmean(times[name] for times in steps) for name in phases}
    range_ms["train_step"] = sum(range_ms.values())
    return {"profiled_steps": PROFILED_STEPS, "range_ms": range_ms}


if __name__ == "__main__":  # nsys runs this module with the arguments PARAMS.json FACTS.json
    _given, _facts = (Path(argument) for argument in sys.argv[1:])
    _params = Params.model_validate_json(_given.read_text())
    _facts.write_text(json.dumps(_steps_under_nsys(_params)))
