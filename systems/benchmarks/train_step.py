"""Time a Transformer's forward, backward and optimizer separately, and whole steps.

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
from systems.training.params import TransformerParams

if TYPE_CHECKING:
    from systems.training.phases import Phases
    from systems.training.training import Training

VERSION = 1
PRELOAD = ("torch._dynamo",)  # a first optimizer imports it


class Params(TransformerParams):
    """A TransformerLM on one batch.

    passes: forward, forward_backward or train_step.
    warmup_steps: steps before the first sample; 0 includes the first step of a fresh process.
    measure_steps: steps timed by phase, and as many again timed as a whole.
    fresh_caches: start with empty torch.compile and Triton caches, so that compilation is measured.
    """

    passes: accounting.Phase = "train_step"
    warmup_steps: Annotated[int, Field(ge=0)] = 5
    measure_steps: Annotated[int, Field(ge=1)] = 10
    fresh_caches: bool = False


def predict(params: Params) -> dict[str, Any]:
    """Predict parameters, FLOPs, and bytes of memory in mode: eager.

    Memory is not predicted for checkpointing that accounting does not know.
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
        predicted["peak_memory_bytes"] = accounting.peak_memory_bytes(params.passes, *memory)
    return predicted


def run(params: Params) -> dict[str, Any]:
    """Return facts of one point: samples_ms and peak memory by phase, FLOPs, tokens, losses.

    forward, backward and optimizer are timed by Python's clock with the GPU idle at both ends, as
    in the published studies, so Python overhead is included. train_step is the time from the end of
    one step to the end of the next, without synchronisation in between.

    Raises:
        Unsupported: this machine cannot do what is asked.
        WrongOutput: the error of the loss or a gradient is too large.
    """
    with _empty_caches() if params.fresh_caches else contextlib.nullcontext():
        return _measure(params)


@contextlib.contextmanager
def _empty_caches() -> Iterator[None]:
    """Point torch.compile and Triton to empty cache folders in this block."""
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
    from systems.training.phases import by_phase, phases_of, steps_ms, timed_steps
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
    """Return the peak memory of each phase, and of the step; empty on a CPU."""
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
    """Return seconds spent on compiling, capturing and other work that is done once: before the
    first step, and in it beyond the time of a later step. None if nothing is compiled or there is
    no later step."""
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
