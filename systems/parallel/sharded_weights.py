"""Shard weights over ranks, all-gather them layer by layer and reduce-scatter their gradients.

A weight is flattened and split into one shard per rank. The unsharded weight is a tensor whose
storage is allocated only from `gather_weights` to `release`. So its memory can be freed while
autograd has the tensor saved for backward. Before backward uses the tensor, it is gathered again,
with the same values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import ReduceScatterOptions

from systems.parallel.collectives import Gather, mean_or_sum, start_gather, supports_average


class FSDPParameter:
    """A parameter in two forms: `shard` for the optimizer, `unsharded` for the computation.

    The modules have `shard` as their parameter, except while they run.

    Args:
        shard: leaf in at least float32; for a replicated parameter, the whole parameter.
        unsharded: leaf in the shape and dtype of the computation; backward computes its gradient.
        places: (module, parameter name) pairs; several if the parameter is tied.
    """

    def __init__(
        self, shard: nn.Parameter, unsharded: nn.Parameter, places: list[tuple[nn.Module, str]]
    ):
        self.shard, self.unsharded, self.places = shard, unsharded, places
        self.show_shard()

    def show_shard(self) -> None:
        for module, name in self.places:
            module._parameters[name] = self.shard

    def show_unsharded(self) -> None:
        for module, name in self.places:
            module._parameters[name] = self.unsharded


class ShardedWeight(FSDPParameter):
    """A weight that is split over the ranks; `shard` is the one-dimensional part of this rank.

    If the weight does not divide evenly, shards of the last ranks are shorter or empty.

    Args:
        weight: the whole weight, with the values of rank 0.
        places: as for FSDPParameter.
        dtype: dtype of communication and of the unsharded weight.
        group: the process group.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        places: list[tuple[nn.Module, str]],
        dtype: torch.dtype,
        group: dist.ProcessGroup,
    ):
        self.shape, self.numel = weight.shape, weight.numel()
        self.width = -(-self.numel // group.size())  # elements of a shard with its padding
        start = min(group.rank() * self.width, self.numel)
        piece = weight.detach().reshape(-1)[start : start + self.width]
        shard = piece.to(master_dtype(weight), copy=True)
        self.flat = torch.empty(group.size() * self.width, dtype=dtype, device=weight.device)
        # .data has a separate version counter. So autograd does not report a saved weight as
        # modified in place when a gather writes it, with the same values, into `flat`.
        unsharded = self.flat.data[: self.numel].view(self.shape)
        self.flat.untyped_storage().resize_(0)
        self.gathering: Gather | None = None  # all-gather in flight
        self.trained = weight.requires_grad
        super().__init__(
            nn.Parameter(shard, weight.requires_grad),
            nn.Parameter(unsharded, weight.requires_grad),
            places,
        )

    @property
    def gathered(self) -> bool:
        """True from the start of a gather to `release`; the values are valid after `wait`."""
        return self.flat.untyped_storage().size() > 0

    def wait(self) -> None:
        """Wait for the gather. With NCCL, the current stream waits and the host does not block."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def release(self) -> None:
        """Free the unsharded weight.

        Queued kernels may still read it, because the CUDA allocator reuses memory in stream order.
        """
        if self.gathered:
            self.wait()
            self.flat.untyped_storage().resize_(0)
        self.show_shard()


def master_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of the optimizer's copy: float32, or float64 for a float64 tensor."""
    return torch.promote_types(tensor.dtype, torch.float32)


class Layer:
    """Parameters of a module that are gathered, freed and reduced together.

    Args:
        module: the module that is a layer.
        parameters: parameters of the module, and of its submodules if the layer includes them.
        owned: the subset of `parameters` that this layer reduces. A tied weight is owned by only
            one of its layers.
    """

    def __init__(
        self, module: nn.Module, parameters: list[FSDPParameter], owned: list[FSDPParameter]
    ):
        self.module, self.parameters = module, parameters
        self.weights = [p for p in parameters if isinstance(p, ShardedWeight)]
        self.frozen = [weight for weight in self.weights if not weight.trained]
        self.reduced = [weight for weight in self.weights if weight.trained and weight in owned]
        self.arrived: list[ShardedWeight] = []  # subset of `reduced` whose gradients are complete
        self.position = 0  # index of the layer in the order of the last forward


def find_layers(
    root: nn.Module,
    classes: tuple[type[nn.Module], ...],
    by_module: dict[nn.Module, list[FSDPParameter]],
) -> list[Layer]:
    """Return a layer for each module that has parameters itself.

    An instance of one of the classes and a compiled module form a single layer with all of their
    submodules. For compiled code this is necessary because all of its weights must be gathered
    before it runs.

    Args:
        root: module whose submodules are searched.
        classes: classes of modules that form a single layer.
        by_module: parameters with two forms, by the module that has them.
    """
    layers: list[Layer] = []
    taken: set[nn.Module] = set()
    owned: set[FSDPParameter] = set()
    for module in root.modules():  # a parent comes before its children
        if module in taken:
            continue
        # Compiled by module.compile(), or by torch.compile(module), which wraps it in a module.
        compiled = module._compiled_call_impl is not None or "_orig_mod" in module._modules
        inside = list(module.modules()) if compiled or isinstance(module, classes) else [module]
        taken.update(inside)
        parameters = list(dict.fromkeys(p for m in inside for p in by_module.get(m, ())))
        if parameters:
            layers.append(Layer(module, parameters, [p for p in parameters if p not in owned]))
            owned.update(parameters)
    return layers


@torch.no_grad()
def gather_weights(weights: list[ShardedWeight], group: dist.ProcessGroup) -> None:
    """Start to all-gather the weights that are not gathered yet, in one collective per dtype.

    NCCL starts when the work that is already in the current stream is done. So a gather that is
    issued two layers ahead overlaps the computation of these two layers, and it does not overwrite
    memory that an earlier layer freed before the kernels of that layer are done. No further stream
    or event is needed.
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
            piece = weight.shard.detach()
            if piece.dtype != weight.flat.dtype or piece.numel() != weight.width:
                # Cast or pad the shard in this rank's slice of the output, so that the all-gather
                # is in place.
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
    """A reduce-scatter in flight."""

    work: dist.Work
    inputs: list[Tensor]  # unsharded gradients, kept alive until the collective has read them
    outputs: list[tuple[ShardedWeight, Tensor]]

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the results and add them to the gradients of the shards.

        With NCCL, the current stream waits and the host does not block.
        """
        self.work.wait()
        for weight, output in self.outputs:
            piece = output[: weight.shard.numel()]
            if weight.shard.grad is None:
                weight.shard.grad = piece.to(weight.shard.dtype)
            else:
                weight.shard.grad.add_(piece)


@torch.no_grad()
def reduce_gradients(weights: list[ShardedWeight], group: dist.ProcessGroup) -> list[Reduction]:
    """Start to reduce-scatter the gradients of the unsharded weights, averaged over the ranks.

    It issues one collective per dtype and sets `unsharded.grad` to None.
    """
    by_dtype: dict[torch.dtype, list[ShardedWeight]] = {}
    for weight in weights:
        by_dtype.setdefault(weight.flat.dtype, []).append(weight)
    reductions = []
    for alike in by_dtype.values():
        inputs, outputs = [], []
        for weight in alike:
            grad = weight.unsharded.grad
            assert grad is not None
            weight.unsharded.grad = None
            flat = grad.reshape(-1)
            if flat.numel() != weight.flat.numel():
                padded = flat.new_zeros(weight.flat.numel())
                padded[: weight.numel] = flat
                flat = padded
            inputs.append(flat)
            outputs.append(flat.new_empty(weight.width))
        options = ReduceScatterOptions()
        options.reduceOp, options.asyncOp = mean_or_sum(group), True
        if not supports_average(group):
            torch._foreach_div_(inputs, group.size())
        work = group.reduce_scatter_tensor_coalesced(outputs, inputs, options)
        reductions.append(Reduction(work, inputs, list(zip(alike, outputs, strict=True))))
    return reductions
