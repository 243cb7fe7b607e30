"""Memory of a training step: peaks by phase, state, and what a block saves for backward.

python -m jobs.submit sweeps/memory.yaml --local

Weights, gradients, optimizer state and activations are measured on live tensors and compared with
predictions of `systems.accounting`. On a GPU the allocator's history of one step is drawn into
memory_timeline.png, and its largest allocations are traced to the source lines that made them.
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
PRELOAD = ("torch._dynamo",)  # a first optimizer imports it
# Before the measured step: the optimizer makes its state, and cuBLAS its workspaces, which would be
# counted as activations.
WARMUP_STEPS = 2


class Params(TransformerParams):
    """A TransformerLM's memory in one forward pass, without an optimizer, or in one training step.

    snapshot: also keep the allocator's snapshot, as snapshot.pickle, for
        https://pytorch.org/memory_viz.
    """

    passes: Literal["forward", "train_step"] = "train_step"
    snapshot: bool = False

    @model_validator(mode="after")
    def _allocates_as_it_runs(self) -> Self:
        if self.mode != "eager" or self.cuda_graph:
            raise ValueError(
                "memory is measured in mode: eager without cuda_graph: a replayed graph allocates "
                "nothing, and what a compiled block saves has no source line"
            )
        return self


def predict(params: Params) -> dict[str, Any]:
    """Predict the facts of a run, as far as accounting can.

    Activations are not predicted with checkpointing, and the peak is not for policies that
    accounting does not know.
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
    """Return peak memory by phase, on a GPU, and facts in bytes, under the names of `predict`:

    weights, gradients, optimizer_state   of the tensors alive at the end of a step
    activations       allocated in forward and alive after it; on a GPU
    saved, weight_copies   what autograd saves for backward, without weights and batch, and the part
                      of it that is autocast's 16-bit copies of weights; without checkpointing
    residual_stream, block_saved, block_gradients, block_weight_copies   of the first block
    block_saved       the list of its five largest contributors
    timeline_peak, peak_phase, at_peak, largest_allocations   of the step's timeline; on a GPU

    Raises:
        Unsupported: this machine cannot do what is asked.
        WrongOutput: loss or gradient is too far from float64.
    """
    import torch

    from systems.measure.memory_timeline import recording
    from systems.training.gradient_check import check_training
    from systems.training.phases import phases_of
    from systems.training.training import make_training

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if params.snapshot and device.type != "cuda":
        raise Unsupported("snapshot: true keeps what CUDA's allocator records; this is a CPU")
    # From the start, so that weights, too, are traced to the line that made them.
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
        training.optimizer.state.clear()  # master weights, if there are any
    for _ in range(WARMUP_STEPS):
        if params.passes == "forward":
            training.forward()
        else:
            training.step()
        _free(training)


def _free(training: Training) -> None:
    """Free gradients and the graph of the loss, also what reference cycles keep of them."""
    training.zero_grad()
    gc.collect()


def _step_on_cpu(training: Training, phases: Phases) -> dict[str, Any]:
    """Return facts that need no allocator statistics."""
    from systems.measure.state_memory import state_bytes

    for run_phase in phases.values():
        run_phase()
    return state_bytes(training.model.parameters(), training.optimizer)


def _step_on_gpu(
    training: Training, params: Params, phases: Phases
) -> tuple[dict[str, int], dict[str, Any]]:
    """Run one step; return peaks by phase and facts, and draw its timeline."""
    from systems.measure.memory_timeline import mark_phase
    from systems.measure.peak_memory import peak_memory_by_phase
    from systems.measure.state_memory import state_bytes

    peaks: dict[str, int] = {}
    requested: dict[str, int] = {}  # bytes that tensors asked for, after each phase
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
    """Read and draw the allocator's history; return what is in use at the peak."""
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
    # Addresses of gradients hold at the end of backward, the others from the start.
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
    """Replace the block's number in a parameter's name, to group parameters of all blocks."""
    return re.sub(r"\.\d+\.", ".*.", name)


def _weights(training: Training) -> dict[str, torch.Tensor]:
    return dict(training.model.named_parameters())


def _gradients(training: Training) -> dict[str, torch.Tensor]:
    named = training.model.named_parameters()
    return {name: p.grad for name, p in named if p.grad is not None}


def _optimizer_state(training: Training) -> dict[str, torch.Tensor]:
    """Return moments, master weights and step counts."""
    return {
        f"{i} {name}": tensor
        for i, state in enumerate(training.optimizer.state.values())
        for name, tensor in state.items()
    }


def _saved(training: Training) -> dict[str, int]:
    """Return bytes that autograd saves in forward, and how many are autocast's copies."""
    from systems.measure.saved_tensors import saved_tensors

    model = training.model
    excluded = [*model.parameters(), *model.buffers(), training.tokens, training.targets]
    saved = saved_tensors(training.forward, excluded)
    return {
        "saved_bytes": sum(tensor.saved_bytes for tensor in saved),
        "weight_copies_bytes": sum(t.saved_bytes for t in saved if t.weight_copy),
    }


def _block(training: Training) -> dict[str, Any]:
    """Report what the first block saves, for the embedding's output as its input."""
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
