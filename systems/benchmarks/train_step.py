"""One Transformer's forward, backward and optimizer: each timed apart, and whole steps.

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

from systems import accounting
from systems.training.params import Passes, TransformerParams

if TYPE_CHECKING:
    from systems.training.step_timing import Phases
    from systems.training.training import Training

VERSION = 1
PRELOAD = ("torch._dynamo",)  # a first optimizer imports it


class Params(TransformerParams):
    """A TransformerLM on one batch, from passes: forward, forward_backward or train_step.

    warmup_steps: steps that are not kept; 0 keeps the first of a fresh process.
    measure_steps: steps whose phases are timed apart, and as many again in one go.
    fresh_caches: compile and Triton caches start empty, so that none made earlier hides the cost.
    """

    passes: Passes = "train_step"
    warmup_steps: Annotated[int, Field(ge=0)] = 5
    measure_steps: Annotated[int, Field(ge=1)] = 10
    fresh_caches: bool = False


def predict(params: Params) -> dict[str, Any]:
    """What arithmetic says beforehand: parameters, FLOPs, and bytes of memory in mode: eager.

    Without predictions of memory where accounting does not know the checkpointing.
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
        every = params.checkpoint_every if params.checkpointing == "every_k" else 0
        memory = (size, *point, params.precision, kind, every)
        predicted["activations_bytes"] = accounting.activation_bytes(*memory)
        predicted["peak_memory_bytes"] = accounting.peak_memory_bytes(params.passes, *memory)
    return predicted


def run(params: Params) -> dict[str, Any]:
    """Facts of one point: samples_ms and peak memory by phase, FLOPs, tokens, the losses.

    forward, backward and optimizer are read from Python's clock with the GPU idle at both ends, as
    in the published studies; so what Python itself takes is in them. train_step is the time from
    the end of one step to the end of the next, with nothing waited for between.

    Raises:
        Unsupported: this machine cannot do what is asked.
        WrongOutput: loss or gradient is too far from float64.
    """
    with _empty_caches() if params.fresh_caches else contextlib.nullcontext():
        return _measure(params)


@contextlib.contextmanager
def _empty_caches() -> Iterator[None]:
    """The folders in which torch.compile and Triton look for what they compiled before."""
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

    from systems.training.gradient_check import check_training
    from systems.training.step_timing import by_phase, phases_of, steps_ms, timed_steps
    from systems.training.training import make_training

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    started = time.perf_counter()
    training = make_training(params, device)
    phases = phases_of(training, params.passes)
    losses: list[float] = []
    steps: list[dict[str, float]] = []
    for times in timed_steps(training, phases, params.warmup_steps + params.measure_steps):
        steps.append(times)
        losses.append(training.loss.item())
    first_step = sum(steps[0].values())
    samples = by_phase(steps[params.warmup_steps :])
    if params.passes == "train_step":
        samples["train_step"] = steps_ms(training, params.measure_steps)
    peaks = _peaks(phases, training)
    measured = time.perf_counter() - started
    errors = check_training(training)
    moved = accounting.optimizer_step_bytes(params.model_size, params.precision)
    return {
        "samples_ms": samples,
        "peak_memory_bytes": peaks,
        **params.counts(samples),
        "bytes": {"optimizer": moved} if "optimizer" in samples else {},
        "compiling_seconds": _once_seconds(training, params.warmup_steps, first_step, samples),
        "facts": {
            "parameters": sum(p.numel() for p in training.model.parameters()),
            "losses": losses,
            "relative_error": errors,
            "first_step_ms": first_step,
            "building_and_measuring_seconds": measured,
        },
    }


def _peaks(phases: Phases, training: Training) -> dict[str, int]:
    """Peak memory of each phase, and of the whole step; nothing on a CPU."""
    from systems.measure.peak_memory import peak_memory_by_phase

    if training.device.type != "cuda":
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
    """Seconds spent on compiling, capturing and all else that is done once: before the first step,
    and in it beyond what a later one takes. None where nothing is compiled, and where there is no
    later step."""
    params = training.params
    if params.mode == "eager" and not params.cuda_graph:
        return None
    apart = [s for name, s in samples.items() if name in ("forward", "backward", "optimizer")]
    if not warmup_steps:
        apart = [s[1:] for s in apart]  # the first step is no later one
    if not apart[0]:
        return None
    later = sum(sum(s) / len(s) for s in apart)
    return round(training.preparing_seconds + max(0.0, first_step - later) / 1e3, 3)
