"""Measure time and peak memory of a Transformer's training step and of its phases.

Run it on this machine, without Slurm:

    python -m jobs.submit sweeps/transformer.yaml --local
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from systems import accounting, implementation_sources
from systems.benchmark import Sources, round_options
from systems.training.params import TransformerParams

if TYPE_CHECKING:
    from systems.training.phases import Phases
    from systems.training.training import Training

VERSION = 1
PRELOAD = ("torch._dynamo",)


class Params(TransformerParams):
    """Parameters of the measured training step. Has all fields of `TransformerParams`."""

    # Phases of a measured step: forward (forward only), forward_backward (forward and backward) or
    # train_step (forward, backward and optimizer).
    passes: accounting.Phase = "train_step"
    # Number of steps before the first sample. With 0 the samples include the first step of the
    # process, which is slower.
    warmup_steps: Annotated[int, Field(ge=0)] = 5
    # Number of steps that are timed phase by phase. With passes: train_step, the same number of
    # further steps is timed as a whole.
    measure_steps: Annotated[int, Field(ge=1)] = 10
    # Whether to start with empty caches of torch.compile and Triton, to measure compilation.
    fresh_caches: bool = False


def sources(params: Params) -> Sources:
    """Return the modules that count for the results of a run with these parameters."""
    return implementation_sources.of_training(params.attention, params.optimizer)


def predict(params: Params) -> dict[str, Any]:
    """Predict the number of parameters, and the FLOPs and the memory of a training step.

    The memory is predicted for eager execution, even if `params.mode` selects compilation. Memory
    is predicted only if `params.checkpointing` is "none" or "every_k".
    """
    size, point = params.model_size, (params.batch_size, params.context_length)
    kind = params.attention_kind
    predicted = {
        "parameters": accounting.transformer_parameters(size),
        "train_step_flops": accounting.transformer_flops("train_step", size, *point),
        "optimizer_bytes": accounting.optimizer_step_bytes(size, params.precision),
        "best_checkpoint_interval": accounting.best_checkpoint_interval(
            size, *point, params.precision, kind
        ),
    }
    if params.checkpointing in ("none", "every_k"):
        interval = params.checkpoint_every if params.checkpointing == "every_k" else 0
        memory = (size, *point, params.precision, kind, interval)
        predicted["activations_bytes"] = accounting.activation_bytes(*memory)
        peak = accounting.peak_memory_bytes(params.passes, *memory)
        if params.precision == "bf16_master" and params.passes != "train_step":
            # The optimizer makes its state with the master weights, before any update.
            peak += accounting.model_state_bytes(size, params.precision)["optimizer_state"]
        predicted["peak_memory_bytes"] = peak
    return predicted


def run(params: Params) -> dict[str, Any]:
    """Time training steps, measure peak memory, and check the loss and gradients.

    Peak memory is measured on a GPU only, and not with `params.cuda_graph`.

    Phases:
        forward, backward, optimizer: timed separately with Python's clock. The GPU is idle at the
            start and at the end of each phase, so the time includes Python overhead. Results that
            others have published, and that tables show for comparison, were measured in this way.
        forward_backward: sum of forward and backward.
        train_step: time of a step in a series of steps. On a GPU the host does not wait for the GPU
            between steps, and a step is measured from the end of the previous step.
        train_step_sustained: time of a step in a series that lasts for seconds, if the round of a
            block asks for it, see `sustained_ms`.

    Facts:
        parameters: number of parameters of the model.
        losses: those of the warm-up steps, then those of the steps that are timed phase by phase.
        relative_error: errors of the loss and the gradients, see `check_training`. Missing in
            rounds of a block, see `jobs.block`.
        sustained_calls: number of steps in the phases train_step and train_step_sustained, to
            divide the energy by. On a GPU, train_step has one more than it has samples.
        launch_bound: [train_step_sustained] if the host issued its steps not faster than the GPU
            executed them. Missing otherwise.
        first_step_ms: time of the first step in this process.
        building_and_measuring_seconds: time from the start of model construction to the end of the
            last measurement.

    Raises:
        Unsupported: if this machine does not support the parameters.
        WrongOutput: if the error of the loss or of a gradient is above the tolerance.
    """
    with _empty_caches() if params.fresh_caches else contextlib.nullcontext():
        return _measure(params)


@contextlib.contextmanager
def _empty_caches() -> Iterator[None]:
    """Make torch.compile and Triton use empty cache folders in a `with` block."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    before = {name: os.environ.pop(name, None) for name in names}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ.update({name: f"{folder}/{name}" for name in names})
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def _measure(params: Params) -> dict[str, Any]:
    import torch

    from systems.check.gradients import check_training
    from systems.measure.sustained import facts_of, sustained_ms
    from systems.measure.windows import during
    from systems.training.phases import by_phase, phases_of, steps_ms, timed_steps
    from systems.training.training import make_training

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    started = time.perf_counter()
    training = make_training(params, device)
    phases = phases_of(training, params.passes)
    losses: list[float] = []
    steps: list[dict[str, float]] = []
    count = params.warmup_steps + params.measure_steps
    for times in timed_steps(training, phases, count, params.warmup_steps):
        steps.append(times)
        losses.append(training.loss.item())
    first_step = sum(steps[0].values())
    samples = by_phase(steps[params.warmup_steps :])
    extra: dict[str, Any] = {}
    if params.passes == "train_step":
        samples["train_step"], calls = steps_ms(training, params.measure_steps)
        extra["sustained_calls"] = {"train_step": calls}
    peaks = _peaks(phases, training)
    measured = time.perf_counter() - started
    counts = params.counts(samples)
    options = round_options()
    if options.sustained_s and params.passes == "train_step":
        name = "train_step_sustained"
        with during(name):
            sustained = sustained_ms(training.step, device, options.sustained_s, phase=name)
        samples[name] = sustained.samples_ms
        facts = facts_of({name: sustained})
        extra |= facts | {"sustained_calls": extra["sustained_calls"] | facts["sustained_calls"]}
        for by_name in counts.values():
            by_name[name] = by_name["train_step"]
    if options.check:
        with during("check"):
            extra["relative_error"] = check_training(training)
    moved = accounting.optimizer_step_bytes(params.model_size, params.precision)
    return {
        "samples_ms": samples,
        "peak_memory_bytes": peaks,
        **counts,
        "bytes": {"optimizer": moved} if "optimizer" in samples else {},
        "compiling_seconds": _once_seconds(training, params.warmup_steps, first_step, samples),
        "facts": {
            "parameters": sum(p.numel() for p in training.model.parameters()),
            "losses": losses,
            **extra,
            "first_step_ms": first_step,
            "building_and_measuring_seconds": measured,
        },
    }


def _peaks(phases: Phases, training: Training) -> dict[str, int]:
    """Return the peak bytes of each phase and of the step (train_step); {} on a CPU.

    {} with CUDA graphs, too: a replay allocates nothing, so the peaks would lack the activations.
    """
    from systems.measure.peak_memory import peak_memory_by_phase

    if training.device.type != "cuda" or training.params.cuda_graph:
        return {}
    gc.collect()
    peaks = peak_memory_by_phase(phases, training.device)
    training.zero_grad()
    if "optimizer" in peaks:
        peaks["train_step"] = max(peaks.values())
    return peaks


def _once_seconds(
    training: Training, warmup_steps: int, first_step: float, samples: dict[str, list[float]]
) -> float | None:
    """Estimate the seconds spent on compilation and on the capture of CUDA graphs.

    It is the time of warm-up and capture before the first step, and the time by which the first
    step is longer than the mean of later steps. Times of steps and samples are in milliseconds. The
    first `warmup_steps` steps are not in `samples`. None if nothing is compiled or captured, or if
    there is no step after the first one.
    """
    params = training.params
    if params.mode == "eager" and not params.cuda_graph:
        return None
    apart = [s for name, s in samples.items() if name in ("forward", "backward", "optimizer")]
    if not warmup_steps:
        apart = [s[1:] for s in apart]  # without the first step
    if not apart[0]:
        return None
    later = sum(sum(s) / len(s) for s in apart)
    return round(training.preparing_seconds + max(0.0, first_step - later) / 1e3, 3)
