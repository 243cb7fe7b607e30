"""Memory of a training step: peak by phase, model and optimizer state, and saved activations.

python -m jobs.submit sweeps/memory.yaml --local

Weights, gradients, optimizer state and activations are measured on live tensors; tables compare
them with predictions of `systems.accounting`. On a GPU, memory_timeline.png shows the memory in use
during one step, from the history of the CUDA allocator, and the largest allocations are listed with
the source lines that made them.
"""

from __future__ import annotations

import contextlib
import gc
import pickle
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import model_validator

from systems import accounting
from systems.benchmark import Unsupported, artifacts_folder
from systems.training.params import TransformerParams

if TYPE_CHECKING:
    import torch

    from systems.training.phases import Phases
    from systems.training.training import Training

VERSION = 1
PRELOAD = ("torch._dynamo",)  # imported by a process's first optimizer
# Steps before the measured one. In them the optimizer allocates its state, and cuBLAS its
# workspaces, which would otherwise be counted as activations.
WARMUP_STEPS = 2


class Params(TransformerParams):
    """Memory of a TransformerLM in one step. Has all fields of `TransformerParams`.

    Only mode: eager without cuda_graph is allowed.
    """

    # What is measured: forward (one forward pass, without optimizer state) or train_step.
    passes: Literal["forward", "train_step"] = "train_step"
    # Keep the snapshot of the CUDA allocator as the artifact snapshot.pickle, which
    # https://pytorch.org/memory_viz displays. Needs a GPU.
    snapshot: bool = False

    @model_validator(mode="after")
    def _allocates_as_it_runs(self) -> Self:
        if self.mode != "eager" or self.cuda_graph:
            raise ValueError(
                "the memory benchmark needs mode: eager and cuda_graph: false, got mode: "
                f"{self.mode} and cuda_graph: {str(self.cuda_graph).lower()}. A replayed graph "
                "allocates nothing, and the tensors that a compiled block saves have no source line"
            )
        return self


def predict(params: Params) -> dict[str, Any]:
    """Predict the memory of a run in bytes.

    Activations are predicted only without checkpointing, and the peak only with checkpointing: none
    or every_k.
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
    """Measure the memory of one step, then check the training against float64.

    Peak memory by phase is measured on a GPU only.

    Facts:
        weights_bytes, gradients_bytes, optimizer_state_bytes: tensors alive at the end of a step.
        activations_bytes: memory allocated in forward and alive after it. On a GPU.
        requested_peak_bytes: largest sum of the sizes that tensors requested. On a GPU.
        saved_bytes: tensors that autograd saves for backward, except weights and the batch.
            Without checkpointing.
        weight_copies_bytes: the part of saved_bytes that is 16-bit copies of weights, made by
            autocast. Without checkpointing.
        residual_stream_bytes: input of the first block.
        block_saved_bytes, block_weight_copies_bytes, block_gradients_bytes: of the first block, see
            `block_report`.
        block_saved: list of the five largest contributors to block_saved_bytes.
        timeline_peak_bytes, peak_phase, at_peak, largest_allocations: size, phase and composition
            of the peak in the step's timeline. On a GPU.
        relative_error: errors that `check_training` returns.

    Raises:
        Unsupported: if this machine does not support the parameters.
        WrongOutput: if the error of the loss or a gradient is above the tolerance.
    """
    import torch

    from systems.measure.memory_timeline import recording
    from systems.training.gradient_check import check_training
    from systems.training.phases import phases_of
    from systems.training.training import make_training

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if params.snapshot and device.type != "cuda":
        raise Unsupported("snapshot: true needs the CUDA allocator; this machine has no GPU")
    # Record from the start, so that the allocations of weights have source lines, too.
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
        training.optimizer.state.clear()  # frees master weights, if there are any
    for _ in range(WARMUP_STEPS):
        if params.passes == "forward":
            training.forward()
        else:
            training.step()
        _free(training)


def _free(training: Training) -> None:
    """Free the gradients and the autograd graph, including tensors kept by reference cycles."""
    training.zero_grad()
    gc.collect()


def _step_on_cpu(training: Training, phases: Phases) -> dict[str, Any]:
    """Run one step; return the facts that need no allocator statistics."""
    from systems.measure.state_memory import state_bytes

    for run_phase in phases.values():
        run_phase()
    return state_bytes(training.model.parameters(), training.optimizer)


def _step_on_gpu(
    training: Training, params: Params, phases: Phases
) -> tuple[dict[str, int], dict[str, Any]]:
    """Run one step and draw its timeline; return the peak memory by phase, and facts."""
    from systems.measure.memory_timeline import mark_phase
    from systems.measure.peak_memory import peak_memory_by_phase
    from systems.measure.state_memory import state_bytes

    peaks: dict[str, int] = {}
    requested: dict[str, int] = {}  # bytes that live tensors requested, after each phase
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
    """Read and draw the allocator's history; return facts about the peak."""
    import torch

    from systems.measure.memory_timeline import (
        Owner,
        bytes_by_kind,
        draw_timeline,
        kinds,
        largest_allocations,
        read_timeline,
    )

    snapshot = torch.cuda.memory._snapshot()
    folder = artifacts_folder()
    if params.snapshot:
        with (folder / "snapshot.pickle").open("wb") as file:
            pickle.dump(snapshot, file)
    timeline = read_timeline(snapshot, phases, torch.cuda.current_device())
    # Gradients have their addresses at the end of the step, all other owners from its start.
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
    draw_timeline(
        timeline,
        owners,
        f"Memory of {what}: {size}, {params.precision}, {params.attention} attention\n"
        f"{torch.cuda.get_device_name()}",
        folder / "memory_timeline.png",
    )
    time, peak = timeline.peak()
    return {
        "timeline_peak_bytes": peak,
        "peak_phase": timeline.phase_of(time),
        "at_peak": {
            f"{kind.replace(' ', '_')}_bytes": size
            for kind, size in bytes_by_kind(timeline, kinds(timeline, owners), time).items()
        },
        "largest_allocations": largest_allocations(timeline, owners),
    }


def _any_block(name: str) -> str:
    """Replace the index of the block in a parameter's name by *, to group the same parameters."""
    return re.sub(r"\.\d+\.", ".*.", name)


def _weights(training: Training) -> dict[str, torch.Tensor]:
    return dict(training.model.named_parameters())


def _gradients(training: Training) -> dict[str, torch.Tensor]:
    named = training.model.named_parameters()
    return {name: p.grad for name, p in named if p.grad is not None}


def _optimizer_state(training: Training) -> dict[str, torch.Tensor]:
    """Return the tensors of the optimizer state: moments, master weights and step counts."""
    return {
        f"{i} {name}": tensor
        for i, state in enumerate(training.optimizer.state.values())
        for name, tensor in state.items()
    }


def _saved(training: Training) -> dict[str, int]:
    """Return the bytes that autograd saves in forward, and the part that is copies of weights."""
    from systems.measure.saved_tensors import saved_tensors

    model = training.model
    excluded = [*model.parameters(), *model.buffers(), training.tokens, training.targets]
    saved = saved_tensors(training.forward, excluded)
    return {
        "saved_bytes": sum(tensor.saved_bytes for tensor in saved),
        "weight_copies_bytes": sum(t.saved_bytes for t in saved if t.weight_copy),
    }


def _block(training: Training) -> dict[str, Any]:
    """Return `block_report` of the first block, with the embedding's output as its input."""
    import torch

    from systems.measure.saved_tensors import block_report
    from systems.measure.state_memory import storage_bytes

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
