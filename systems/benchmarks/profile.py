"""Time by kernel in a training step, for each phase and for each part of attention.

python -m jobs.submit sweeps/profile.yaml --local

The same steps are also timed without a profiler. `profiler: nsys` runs them under Nsight Systems
and keeps its report; this has been tested only with a script that imitates nsys.
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

from systems import accounting
from systems.benchmark import Unsupported, artifacts_folder
from systems.training.params import TransformerParams

if TYPE_CHECKING:
    from systems.measure.kernel_table import Profile
    from systems.training.training import Training

VERSION = 1
PRELOAD = ("torch._dynamo",)  # imported by a process's first optimizer
PROFILED_STEPS = 3  # few, because steps are alike and each adds megabytes to the trace
TRACE = "trace.json.gz"  # file name of the artifact


class Params(TransformerParams):
    """A TransformerLM's training step, timed without a profiler and then profiled.

    Has all fields of `TransformerParams`.
    """

    # torch (torch.profiler, for tables of kernels) or nsys (Nsight Systems, whose report is kept as
    # an artifact).
    profiler: Literal["torch", "nsys"] = "torch"
    # Keep the trace of torch.profiler as an artifact, which https://ui.perfetto.dev displays. Only
    # with profiler: torch.
    trace: bool = False
    warmup_steps: Annotated[int, Field(ge=0)] = 5  # untimed steps before the first sample
    # Steps timed phase by phase, and as many more timed as a whole, all without a profiler.
    measure_steps: Annotated[int, Field(ge=1)] = 10

    @model_validator(mode="after")
    def _one_trace(self) -> Self:
        if self.trace and self.profiler != "torch":
            raise ValueError(
                f"trace: true needs profiler: torch, got profiler: {self.profiler}, which always "
                "keeps its report"
            )
        return self


def predict(params: Params) -> dict[str, Any]:
    """Predict the ratio of operations in attention's softmax to FLOPs in its matmuls, by phase."""
    size = params.model_size
    head_dim = size.d_model // size.num_heads
    return {
        "softmax_over_matmul_flops": {
            phase: accounting.softmax_over_matmul_flops(phase, head_dim)
            for phase in ("forward", "backward")
        }
    }


def run(params: Params) -> dict[str, Any]:
    """Time training steps without a profiler, profile some more, and check the training.

    samples_ms has the same phases as in the benchmark `train_step`.

    Facts:
        results of `kernel_table.kernel_facts` for the profiled steps, with profiler: torch.
        report, profiled_steps, range_ms: name of the report, number of profiled steps, and mean
            time of each phase in them, with profiler: nsys.
        trace: name of the trace, with trace: true.
        range_over_clock: time of each phase under the profiler, divided by its time without.
        kernels_over_clock: time of all kernels of each phase, divided by the phase's time without
            the profiler. With profiler: torch.
        relative_error: errors that `check_training` returns.

    Raises:
        Unsupported: if this machine does not support the parameters.
        WrongOutput: if the error of the loss or a gradient is above the tolerance.
    """
    import torch

    from systems.measure import nsys
    from systems.training.gradient_check import check_training
    from systems.training.phases import by_phase, phases_of, steps_ms, timed_steps
    from systems.training.training import make_training

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if params.profiler == "nsys":
        reason = nsys.unsupported_reason()
        if reason is not None:
            raise Unsupported(reason)
    training = make_training(params, device)
    phases = phases_of(training)
    steps = list(timed_steps(training, phases, params.warmup_steps + params.measure_steps))
    samples = by_phase(steps[params.warmup_steps :])
    samples["train_step"] = steps_ms(training, params.measure_steps)
    facts = _torch_facts(training, params) if params.profiler == "torch" else {}
    errors = check_training(training)
    if params.profiler == "nsys":
        del training, phases  # frees GPU memory for the process under nsys
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
    from systems.measure.kernel_table import kernel_facts, read_profile

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

    annotate_attention(training)  # after the unprofiled steps, which run without annotations
    phases = phases_of(training)
    with step_profiler(training.device, trace, PROFILED_STEPS) as profiler:
        for _ in range(1 + PROFILED_STEPS):
            annotated_step(training, phases)
            profiler.step()


def _over_clock(facts: dict[str, Any], samples: dict[str, list[float]]) -> dict[str, Any]:
    """Return times in the profile divided by the median unprofiled time, phase by phase."""
    clock = {
        name: statistics.median(samples[name]) for name in ("forward", "backward", "optimizer")
    }
    return {
        name: {phase: facts[key][phase] / ms for phase, ms in clock.items() if phase in facts[key]}
        for name, key in (("range_over_clock", "range_ms"), ("kernels_over_clock", "kernel_ms"))
        if key in facts
    }


def _steps_under_nsys(params: Params) -> dict[str, Any]:
    """Run the annotated steps that nsys records; return the mean time of each range.

    Times are in milliseconds, by Python's clock.
    """
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


if __name__ == "__main__":  # arguments under nsys: PARAMS.json FACTS.json
    _given, _facts = (Path(argument) for argument in sys.argv[1:])
    _params = Params.model_validate_json(_given.read_text())
    _facts.write_text(json.dumps(_steps_under_nsys(_params)))
