"""Weights of which each rank keeps a slice, the layers that they belong to, and the transfers that
make them whole and reduce their gradients.

A weight is laid out flat and cut into as many slices as there are ranks. The whole weight is a
tensor whose storage is there only from `gather_weights` to `release`. That is what lets it be freed
while autograd has it saved for backward: backward finds the same tensor, and the same values once
it has been gathered again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import ReduceScatterOptions

from systems.parallel.collectives import Gather, averages_itself, mean_or_sum, start_gather


class Held:
    """A parameter in two forms: `kept`, which the optimizer steps, and `full`, of the dtype and the
    shape that the module computes with. The module shows `kept` except while it runs.

    Args:
        kept: a leaf, at least float32.
        full: a leaf, too; its gradient is what backward computes.
        places: the modules that have the parameter, each with its name there: several if tied.
    """

    def __init__(self, kept: nn.Parameter, full: nn.Parameter, places: list[tuple[nn.Module, str]]):
        self.kept, self.full, self.places = kept, full, places
        self.show_kept()

    def show_kept(self) -> None:
        for module, name in self.places:
            module._parameters[name] = self.kept

    def show_full(self) -> None:
        for module, name in self.places:
            module._parameters[name] = self.full


class ShardedWeight(Held):
    """A weight of which `kept` is this rank's slice: one dimension, uneven where the ranks do not
    divide the weight, and empty where there are more ranks than elements."""

    def __init__(
        self,
        weight: nn.Parameter,
        places: list[tuple[nn.Module, str]],
        dtype: torch.dtype,
        group: dist.ProcessGroup,
    ):
        self.shape, self.numel = weight.shape, weight.numel()
        self.width = -(-self.numel // group.size())  # of a slice with its padding
        start = min(group.rank() * self.width, self.numel)
        piece = weight.detach().reshape(-1)[start : start + self.width]
        kept = piece.to(master_dtype(weight), copy=True)
        self.flat = torch.empty(group.size() * self.width, dtype=dtype, device=weight.device)
        # Of .data, so that a gather is no change to what autograd saved: it restores the values.
        full = self.flat.data[: self.numel].view(self.shape)
        self.flat.untyped_storage().resize_(0)
        self.gathering: Gather | None = None  # on its way
        self.trained = weight.requires_grad
        super().__init__(
            nn.Parameter(kept, weight.requires_grad),
            nn.Parameter(full, weight.requires_grad),
            places,
        )

    @property
    def gathered(self) -> bool:
        """Whether the storage is there, if not yet all values."""
        return self.flat.untyped_storage().size() > 0

    def wait(self) -> None:
        """Gloo: until it is gathered. NCCL: the current stream waits, the host does not."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def release(self) -> None:
        """Free the whole weight. A GPU's allocator hands the memory on in stream order, so kernels
        that are still to read it may be."""
        if self.gathered:
            self.wait()
            self.flat.untyped_storage().resize_(0)
        self.show_kept()


def master_dtype(tensor: Tensor) -> torch.dtype:
    """Of what the optimizer steps: float32, or wider if the module's is."""
    return torch.promote_types(tensor.dtype, torch.float32)


class Layer:
    """What is gathered, freed and reduced at once: some parameters of a module.

    Args:
        held: of the module, or of all that is beneath it.
        owned: those of them that no other layer reduces; tied weights have one owner.
    """

    def __init__(self, module: nn.Module, held: list[Held], owned: list[Held]):
        self.module, self.held = module, held
        self.weights = [each for each in held if isinstance(each, ShardedWeight)]
        self.frozen = [weight for weight in self.weights if not weight.trained]
        self.reduced = [weight for weight in self.weights if weight.trained and weight in owned]
        self.arrived: list[ShardedWeight] = []  # of those, the ones whose gradients are complete
        self.position = 0  # in the last forward


def find_layers(
    root: nn.Module, classes: tuple[type[nn.Module], ...], by_module: dict[nn.Module, list[Held]]
) -> list[Layer]:
    """Each module that has parameters of its own; and whole, with all that is beneath it, each that
    is of one of the classes, or compiled: what is compiled must find its weights there."""
    layers: list[Layer] = []
    taken: set[nn.Module] = set()
    owned: set[Held] = set()
    for module in root.modules():  # a parent comes before its children
        if module in taken:
            continue
        # By module.compile(), or by torch.compile(module), which puts a module around it.
        compiled = module._compiled_call_impl is not None or "_orig_mod" in module._modules
        inside = list(module.modules()) if compiled or isinstance(module, classes) else [module]
        taken.update(inside)
        held = list(dict.fromkeys(each for m in inside for each in by_module.get(m, ())))
        if held:
            layers.append(Layer(module, held, [each for each in held if each not in owned]))
            owned.update(held)
    return layers


@torch.no_grad()
def gather_weights(weights: list[ShardedWeight], group: dist.ProcessGroup) -> None:
    """Begin to gather those weights that are not there; one collective for each dtype.

    NCCL begins when what the current stream has been given is done. So a gather that is asked for
    two layers ahead runs beside the computation of those two, and memory that an earlier layer
    freed is not written before its kernels are done: no other stream or event is needed.
    """
    by_dtype: dict[torch.dtype, list[ShardedWeight]] = {}
    for weight in weights:
        if not weight.gathered:
            flat = weight.flat
            flat.untyped_storage().resize_(flat.numel() * flat.element_size())
            by_dtype.setdefault(flat.dtype, []).append(weight)
    for alike in by_dtype.values():
        inputs, slices, pieces = [], [], []
        for weight in alike:
            piece = weight.kept.detach()
            if piece.dtype != weight.flat.dtype or piece.numel() != weight.width:
                # Cast, or padded, where the collective puts it: it is then in place.
                place = weight.flat.narrow(0, group.rank() * weight.width, weight.width)
                slices.append(place[: piece.numel()])
                pieces.append(piece)
                piece = place
            inputs.append(piece)
        if slices:
            torch._foreach_copy_(slices, pieces)
        outputs = [weight.flat for weight in alike]
        gathering = start_gather(outputs, inputs, group)
        for weight in alike:
            weight.gathering = gathering


class Reduction(NamedTuple):
    """A reduce-scatter that is on its way."""

    work: dist.Work
    inputs: list[Tensor]  # whole gradients, to be kept until they have been read
    outputs: list[tuple[ShardedWeight, Tensor]]

    @torch.no_grad()
    def finish(self) -> None:
        """Wait, as `ShardedWeight.wait` does, and add the slices to the gradients of `kept`."""
        self.work.wait()
        for weight, output in self.outputs:
            piece = output[: weight.kept.numel()]
            if weight.kept.grad is None:
                weight.kept.grad = piece.to(weight.kept.dtype)
            else:
                weight.kept.grad.add_(piece)


@torch.no_grad()
def reduce_gradients(weights: list[ShardedWeight], group: dist.ProcessGroup) -> list[Reduction]:
    """Begin to average the gradients of `full` over the ranks, of which each gets its slice; one
    collective for each dtype. The gradients are taken: `full.grad` is None afterwards."""
    by_dtype: dict[torch.dtype, list[ShardedWeight]] = {}
    for weight in weights:
        by_dtype.setdefault(weight.flat.dtype, []).append(weight)
    reductions = []
    for alike in by_dtype.values():
        inputs, outputs = [], []
        for weight in alike:
            grad = weight.full.grad
            assert grad is not None
            weight.full.grad = None
            flat = grad.reshape(-1)
            if flat.numel() != weight.flat.numel():
                padded = flat.new_zeros(weight.flat.numel())
                padded[: weight.numel] = flat
                flat = padded
            inputs.append(flat)
            outputs.append(flat.new_empty(weight.width))
        options = ReduceScatterOptions()
        options.reduceOp, options.asyncOp = mean_or_sum(group), True
        if not averages_itself(group):
            torch._foreach_div_(inputs, group.size())
        work = group.reduce_scatter_tensor_coalesced(outputs, inputs, options)
        reductions.append(Reduction(work, inputs, list(zip(alike, outputs, strict=True))))
    return reductions
