"""Measure the memory of a training step: weights, gradients, optimizer state, activations, peak.

Run it on this machine, without Slurm:

    python -m jobs.submit sweeps/memory.yaml --local

The sizes are measured on live tensors. On a GPU, the allocator's history of one step is recorded,
too. It gives the memory in use over time, in memory_timeline.plot.json, which `aggregate.py --plot`
draws, and the source lines of the largest allocations.
"""

from __future__ import annotations

import contextlib
import gc
import pickle
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import model_validator

from systems import accounting, implementation_sources
from systems.benchmark import Sources, Unsupported, artifacts_folder
from systems.training.params import TransformerParams

if TYPE_CHECKING:
    import torch

    from systems.training.phases import Phases
    from systems.training.training import Training

VERSION = 1
PRELOAD = ("torch._dynamo",)
# Number of steps before the measured step. In the first step the optimizer allocates its state, and
# cuBLAS its workspaces, which would be counted as activations.
WARMUP_STEPS = 2


class Params(TransformerParams):
    """Parameters of the measured step. `mode` must be "eager" and `cuda_graph` must be False."""

    # Phases to measure: forward (forward only, without optimizer state) or train_step (forward,
    # backward and optimizer).
    passes: Literal["forward", "train_step"] = "train_step"
    # Whether to keep the snapshot of the CUDA allocator as the artifact snapshot.pickle, which
    # https://pytorch.org/memory_viz displays. Needs a GPU.
    snapshot: bool = False

    @model_validator(mode="after")
    def _allocates_as_it_runs(self) -> Self:
        if self.mode != "eager" or self.cuda_graph:
            raise ValueError(
                "the memory benchmark needs `mode: eager` and `cuda_graph: false`, got "
                f"`mode: {self.mode}` and `cuda_graph: {str(self.cuda_graph).lower()}`. Replaying "
                "a CUDA graph allocates no memory. Tensors that compiled code saves have no source "
                "line"
            )
        return self


def sources(params: Params) -> Sources:
    """Return the modules that count for the results of a run with these parameters."""
    return implementation_sources.of_training(params.attention, params.optimizer)


def predict(params: Params) -> dict[str, Any]:
    """Predict the bytes of weights, gradients, optimizer state, activations, and the peak.

    Activations are predicted only without activation checkpointing. The peak is predicted only if
    `params.checkpointing` is "none" or "every_k".
    """
    size, precision, kind = params.model_size, params.precision, params.attention_kind
    point = (params.batch_size, params.context_length)
    state = accounting.model_state_bytes(size, precision)
    residual = accounting.residual_stream_bytes(size, *point, precision)
    saved = accounting.block_saved_bytes(size, *point, precision, kind)
    trains = params.passes == "train_step"
    predicted: dict[str, Any] = {
        "weights_bytes": state["weights"],
        "gradients_bytes": state["gradients"] if trains else 0,
        "optimizer_state_bytes": state["optimizer_state"] if trains else 0,
        "residual_stream_bytes": residual,
        "block_saved_bytes": sum(saved.values()),
        "block_gradients_bytes": accounting.block_gradient_bytes(size, precision) + residual,
    }
    if params.checkpointing == "none":
        predicted["weight_copies_bytes"] = accounting.weight_copy_bytes(size, precision)
        predicted["activations_bytes"] = accounting.activation_bytes(size, *point, precision, kind)
    if params.checkpointing in ("none", "every_k"):
        interval = params.checkpoint_every if params.checkpointing == "every_k" else 0
        predicted["peak_memory_bytes"] = accounting.peak_memory_bytes(
            params.passes, size, *point, precision, kind, interval
        )
    return predicted


def run(params: Params) -> dict[str, Any]:
    """Measure the memory of one step, then check the loss and gradients against float64.

    `peak_memory_bytes` is measured on a GPU only, for forward, backward, optimizer and the whole
    step (train_step).

    Facts:
        weights_bytes, gradients_bytes, optimizer_state_bytes: memory at the end of a step.
        residual_stream_bytes: size of the input of the first block.
        block_saved_bytes, block_saved, block_weight_copies_bytes, block_gradients_bytes: memory of
            the first block, see `block_report`.
        relative_error: errors of the loss and the gradients, see `check_training`.

    Facts on a GPU:
        activations_bytes: memory that forward allocates and that is still allocated when forward
            ends.
        requested_peak_bytes: peak memory in the step, as the sum of the sizes that tensors
            requested. `peak_memory_bytes` counts the sizes to which the CUDA allocator rounds them
            up.
        timeline_peak_bytes: the same peak, from the recorded history of the allocator.
        peak_phase: phase of the step in which the peak of the history is.
        at_peak: bytes in use at the peak of the history, by kind, such as weights_bytes.
        largest_allocations: the largest allocations at the peak of the history, by source line.
        largest_tensors: the largest single allocations in the step, see `largest_tensors`.

    Facts without activation checkpointing:
        saved_bytes: size of the tensors that autograd saves for backward, without the model's
            parameters and buffers, and without the batch.
        weight_copies_bytes: the part of saved_bytes that consists of 16-bit copies of weights,
            which autocast makes.

    Raises:
        Unsupported: if this machine does not support the parameters.
        WrongOutput: if the error of the loss or of a gradient is above the tolerance.
    """
    import torch

    from systems.check.gradients import check_training
    from systems.measure.memory.memory_timeline import recording
    from systems.training.phases import phases_of
    from systems.training.training import make_training

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if params.snapshot and device.type != "cuda":
        raise Unsupported("`snapshot: true` needs the CUDA allocator; this machine has no GPU")
    # Start to record before the weights are allocated, so that these allocations have source lines.
    with recording() if device.type == "cuda" else contextlib.nullcontext():
        training = make_training(params, device)
        _warm_up(training, params)
        phases = phases_of(training, params.passes)
        if device.type == "cuda":
            peaks, facts = _step_on_gpu(training, params, phases)
        else:
            peaks, facts = {}, _step_on_cpu(training, phases)
    _free(training)
    if params.checkpointing == "none":
        facts |= _saved(training)
    facts |= _block(training)
    _free(training)
    errors = check_training(training)
    return {"peak_memory_bytes": peaks, "facts": facts | {"relative_error": errors}}


def _warm_up(training: Training, params: Params) -> None:
    if params.passes == "forward":
        training.optimizer.state.clear()  # with bf16_master this frees the master weights
    for _ in range(WARMUP_STEPS):
        if params.passes == "forward":
            training.forward()
        else:
            training.step()
        _free(training)


def _free(training: Training) -> None:
    """Free the gradients and the autograd graph, including tensors in reference cycles."""
    training.zero_grad()
    gc.collect()


def _step_on_cpu(training: Training, phases: Phases) -> dict[str, Any]:
    """Run one step, and measure the bytes in use at its end, by kind."""
    from systems.measure.memory.state_memory import state_bytes

    for run_phase in phases.values():
        run_phase()
    return state_bytes(training.model.parameters(), training.optimizer)


def _step_on_gpu(
    training: Training, params: Params, phases: Phases
) -> tuple[dict[str, int], dict[str, Any]]:
    """Run one step after the warm-up; return peaks of each phase and of the step, and facts."""
    from systems.measure.memory.memory_timeline import mark_phase
    from systems.measure.memory.state_memory import state_bytes
    from systems.measure.peak_memory import peak_memory_by_phase

    peaks: dict[str, int] = {}
    requested: dict[str, int] = {}  # bytes requested by all live tensors at the end of each phase
    requested_peak = 0
    owned = {"weights": _weights(training), "optimizer state": _optimizer_state(training)}
    before = _requested("current")
    for phase, run_phase in phases.items():
        mark_phase()
        peaks |= peak_memory_by_phase({phase: run_phase}, training.device)
        requested[phase] = _requested("current")
        requested_peak = max(requested_peak, _requested("peak"))
    mark_phase()
    owned["gradients"] = _gradients(training)
    facts = {
        **state_bytes(training.model.parameters(), training.optimizer),
        "activations_bytes": requested["forward"] - before,
        "requested_peak_bytes": requested_peak,
    }
    if "optimizer" in peaks:
        peaks["train_step"] = max(peaks.values())
    return peaks, facts | _timeline(params, list(phases), owned)


def _requested(which: str) -> int:
    import torch

    return torch.cuda.memory_stats()[f"requested_bytes.all.{which}"]


def _timeline(
    params: Params, phases: Sequence[str], owned: Mapping[str, Mapping[str, torch.Tensor]]
) -> dict[str, Any]:
    """Write the allocator's history for a figure, and return the facts about it, see `run`.

    `owned` has the tensors by name of each kind of memory, such as "weights".
    """
    import torch

    from systems.measure.memory.memory_plot import timeline_data
    from systems.measure.memory.memory_timeline import (
        Owner,
        bytes_by_kind,
        kinds,
        largest_allocations,
        largest_tensors,
        read_timeline,
    )
    from systems.plot_data import SUFFIX, write_figure

    snapshot = torch.cuda.memory._snapshot()
    folder = artifacts_folder()
    if params.snapshot:
        with (folder / "snapshot.pickle").open("wb") as file:
            pickle.dump(snapshot, file)
    timeline = read_timeline(snapshot, phases, torch.cuda.current_device())
    # Gradients exist only at the end of the step. All other tensors in `owned` exist at its start.
    at = {"gradients": timeline.phases[-1].end}
    owners = [
        Owner(
            kind,
            at.get(kind, 0),
            {t.untyped_storage().data_ptr(): _any_block(name) for name, t in tensors.items()},
        )
        for kind, tensors in owned.items()
    ]
    size = f"{params.size}, batch {params.batch_size}, context {params.context_length}"
    what = "a training step" if len(phases) > 1 else "forward"
    title = f"Memory of {what}: {size}, {params.precision}, {params.attention} attention"
    device = torch.cuda.get_device_name()
    figure = timeline_data(timeline, owners, f"{title}; {device}")
    write_figure(figure, folder / f"memory_timeline{SUFFIX}")
    time, peak = timeline.peak()
    return {
        "timeline_peak_bytes": peak,
        "peak_phase": timeline.phase_of(time),
        "at_peak": {
            f"{kind.replace(' ', '_')}_bytes": size
            for kind, size in bytes_by_kind(timeline, kinds(timeline, owners), time).items()
        },
        "largest_allocations": largest_allocations(timeline, owners),
        "largest_tensors": largest_tensors(timeline, owners),
    }


def _any_block(name: str) -> str:
    """Replace the block index in a parameter name by *, so that all blocks have the same names."""
    return re.sub(r"\.\d+\.", ".*.", name)


def _weights(training: Training) -> dict[str, torch.Tensor]:
    return dict(training.model.named_parameters())


def _gradients(training: Training) -> dict[str, torch.Tensor]:
    named = training.model.named_parameters()
    return {name: p.grad for name, p in named if p.grad is not None}


def _optimizer_state(training: Training) -> dict[str, torch.Tensor]:
    return {
        f"{i} {name}": tensor
        for i, state in enumerate(training.optimizer.state.values())
        for name, tensor in state.items()
    }


def _saved(training: Training) -> dict[str, int]:
    """Measure saved_bytes and weight_copies_bytes, see `run`."""
    from systems.measure.memory.saved_tensors import saved_tensors

    model = training.model
    excluded = [*model.parameters(), *model.buffers(), training.tokens, training.targets]
    saved = saved_tensors(training.forward, excluded)
    return {
        "saved_bytes": sum(tensor.saved_bytes for tensor in saved),
        "weight_copies_bytes": sum(t.saved_bytes for t in saved if t.weight_copy),
    }


def _block(training: Training) -> dict[str, Any]:
    """Measure the first block, see `run`. Its input is the output of the embedding."""
    import torch

    from systems.measure.memory.saved_tensors import block_report
    from systems.measure.memory.state_memory import storage_bytes

    with torch.no_grad():
        x = training.model.token_embedding(training.tokens)
    x.requires_grad_()
    block = training.model.blocks[0]

    def forward(x: torch.Tensor) -> torch.Tensor:
        with training.autocast():
            return block(x)

    return {
        "residual_stream_bytes": storage_bytes([x]),
        **block_report(forward, block, x),
    }
