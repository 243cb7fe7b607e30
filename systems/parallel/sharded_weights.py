"""Sharded weights for FSDP: all-gather the weights of a layer, reduce-scatter their gradients.

A weight is flattened and split into one shard per rank. After forward the memory of the unsharded
weight is freed, even if autograd has saved the tensor for backward. Before backward uses the
tensor, its memory is allocated again and the same values are gathered.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import ReduceScatterOptions

from systems.parallel.buckets import strides_of
from systems.parallel.collectives import GroupOf, mean_operation, start_gather
from systems.parallel.wrapper import gradient_of

# These modules of torch compute with weights of submodules that they do not call.
WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)

GATHERED = 0  # version of an unsharded weight that has its values, for autograd


class FSDPParameter:
    """A parameter in two forms: `shard` for the optimizer, `unsharded` for the computation.

    A module has `unsharded` as its parameter while it computes, and has `shard` at other times.

    Args:
        shard: leaf tensor, float32 or float64: the part of this rank, or the whole replicated
            parameter.
        unsharded: leaf tensor with the shape and dtype that the modules compute with, for which
            backward computes the gradient.
        places: (module, parameter name) pairs. A tied parameter has more than one.
    """

    def __init__(
        self, shard: nn.Parameter, unsharded: nn.Parameter, places: list[tuple[nn.Module, str]]
    ):
        self.shard, self.unsharded, self.places = shard, unsharded, places

    def show_shard(self) -> None:
        for module, name in self.places:
            module._parameters[name] = self.shard

    def show_unsharded(self) -> None:
        for module, name in self.places:
            module._parameters[name] = self.unsharded


class ShardedWeight(FSDPParameter):
    """A weight that is split over the ranks. `shard` is the part of this rank.

    The shard is the given parameter itself, with other data, so an optimizer may have it already.
    It has as many dimensions as the weight, all but the last of size 1, because optimizers choose
    options by the number of dimensions. The shards of the last ranks may be shorter or empty. The
    given weight is whole, with equal values on all ranks. The dtype is that of communication and of
    the unsharded weight. For `places`, see `FSDPParameter`.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        places: list[tuple[nn.Module, str]],
        dtype: torch.dtype,
        group: dist.ProcessGroup,
    ):
        self.shape, self.numel = weight.shape, weight.numel()
        self.width = -(-self.numel // group.size())  # number of elements of a shard with padding
        self.start = min(group.rank() * self.width, self.numel)
        shard = self.piece_of(weight.detach()).to(master_dtype(weight), copy=True)
        self.flat = torch.empty(group.size() * self.width, dtype=dtype, device=weight.device)
        # A gather writes the same values into `flat` again while autograd has the weight saved.
        # `.data` has a separate version counter, so autograd does not report a modification.
        unsharded = self.flat.data[: self.numel].view(self.shape)
        self.flat.untyped_storage().resize_(0)
        self.gathering: Any = None  # what is in flight, with a method `wait`
        self._version = -1  # of the shard, when the memory was allocated
        self._strides = strides_of(weight)
        weight.data, weight.grad = shard, None
        super().__init__(weight, nn.Parameter(unsharded, weight.requires_grad), places)

    @property
    def gathered(self) -> bool:
        """True if the unsharded weight has memory. Its values are valid only after `wait`."""
        return self.flat.untyped_storage().size() > 0

    @property
    def was_changed(self) -> bool:
        """True if the unsharded weight was changed in place since it was gathered."""
        return self.unsharded._version != GATHERED and self.gathered and self.gathering is None

    def allocate(self) -> None:
        """Allocate the memory of the unsharded weight, without values."""
        self._version = self.shard._version
        self.flat.untyped_storage().resize_(self.flat.numel() * self.flat.element_size())

    def wait(self) -> None:
        """Wait until the weight is gathered. On a GPU, the current stream waits."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
            self._set_version(GATHERED)  # autograd may read what it has saved of it

    def _set_version(self, version: int) -> None:
        torch._C._autograd._unsafe_set_version_counter((self.unsharded,), (version,))

    def take_gradient(self) -> Tensor:
        """Return the gradient of the unsharded weight, and set it to None."""
        gradient = gradient_of(self.unsharded)
        self.unsharded.grad = None
        return gradient

    def piece_of(self, full: Tensor) -> Tensor:
        """Return the part of this rank of a tensor with the shape of the unsharded weight."""
        piece = full.reshape(-1)[self.start : self.start + self.width]
        return piece.view([1] * (len(self.shape) - 1) + [piece.numel()])

    def part_of(self, flat: Tensor, rank: int) -> Tensor:
        """Return the part of a rank, without padding, of a flat tensor like the weight."""
        return flat[rank * self.width : (rank + 1) * self.width]

    @torch.no_grad()
    def gather(self, piece: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return the unsharded tensor whose parts the ranks have, with the strides of the weight.

        All ranks must call this.
        """
        padded = piece.new_zeros(self.width)
        padded[: piece.numel()] = piece.reshape(-1)
        flat = piece.new_empty(group.size() * self.width)
        start_gather([flat], [padded], group).wait()
        whole = flat[: self.numel].view(self.shape)
        if whole.stride() == self._strides:
            return whole
        return torch.empty_strided(
            self.shape, self._strides, dtype=flat.dtype, device=flat.device
        ).copy_(whole)

    def release(self) -> None:
        """Free the memory of the unsharded weight, and give the modules their shards.

        Kernels that are already queued may still read it. This is safe, because the CUDA allocator
        reuses memory in stream order.
        """
        if self.gathered:
            self.wait()
            self.flat.untyped_storage().resize_(0)
            # Autograd raises an error instead of reading it before it is gathered again.
            self._set_version(GATHERED + 1)
        self.show_shard()

    def release_old(self) -> None:
        """Free the unsharded weight if the shard has changed since."""
        if self._version != self.shard._version:
            self.release()


def run_hooks(shard: Any) -> None:
    """Run the user's hooks after the gradient is there. Autograd knows only the unsharded form.

    Raises:
        RuntimeError: if there are hooks that must run before.
    """
    if shard._backward_hooks:
        raise RuntimeError(
            "hooks of Tensor.register_hook do not run for parameters of FSDP, which autograd does "
            "not see; use register_post_accumulate_grad_hook"
        )
    for hook in (shard._post_accumulate_grad_hooks or {}).values():
        hook(shard)


def master_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of a shard of `tensor`: float32, but float64 and integers stay."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.dtype
    return torch.promote_types(tensor.dtype, torch.float32)


class Layer:
    """Parameters that are gathered and freed together, and whose gradients are reduced together.

    A module that is one layer together with its submodules has their parameters, too. The layer
    reduces only the gradients of those that it has `owned`: of several layers with a tied weight,
    one owns it.
    """

    def __init__(
        self, module: nn.Module, parameters: list[FSDPParameter], owned: list[FSDPParameter]
    ):
        self.module = module
        self.weights = [p for p in parameters if isinstance(p, ShardedWeight)]
        self.copies = [p for p in parameters if not isinstance(p, ShardedWeight)]
        self.position = 0  # index of the layer in the order of the last forward
        self.is_reached = False  # whether the present backward has gathered the weights
        by_dtype: dict[torch.dtype, list[ShardedWeight]] = {}
        for weight in self.weights:
            by_dtype.setdefault(weight.flat.dtype, []).append(weight)
        self.alike = list(by_dtype.values())  # the weights that one collective can transfer
        self.frozen = [weight for weight in self.weights if not weight.shard.requires_grad]
        self.reduced = [
            weight for weight in self.weights if weight in owned and weight.shard.requires_grad
        ]
        self.arrived: set[ShardedWeight] = set()  # those of `reduced` with complete gradients


def find_layers(
    root: nn.Module,
    classes: tuple[type[nn.Module], ...],
    by_module: dict[nn.Module, list[FSDPParameter]],
) -> list[Layer]:
    """Divide `root` into layers, each a group of parameters that are gathered together.

    An instance of one of `classes` is one layer together with all of its submodules. So are modules
    of torch that use weights of their submodules without calling them (`WHOLE`), and a compiled
    module, because all of its weights must be gathered before it runs. Each other module that
    directly has parameters is a layer. `by_module` has the parameters that belong directly to a
    module.
    """
    layers: list[Layer] = []
    taken: set[nn.Module] = set()
    owned: set[FSDPParameter] = set()
    for module in root.modules():  # a parent comes before its children
        if module in taken:
            continue
        # Compiled by module.compile(), or by torch.compile(module), which wraps it in a module.
        compiled = module._compiled_call_impl is not None or "_orig_mod" in module._modules
        inside = (
            list(module.modules())
            if compiled or isinstance(module, (*WHOLE, *classes))
            else [module]
        )
        taken.update(inside)
        parameters = list(dict.fromkeys(p for m in inside for p in by_module.get(m, ())))
        if parameters:
            layers.append(Layer(module, parameters, [p for p in parameters if p not in owned]))
            owned.update(parameters)
    return layers


class Reduction(NamedTuple):
    """A reduce-scatter of gradients that was started. `finish` waits for its results."""

    work: Any  # has a method `wait`
    inputs: list[Tensor]  # unsharded gradients, kept alive until the collective has read them
    outputs: list[tuple[ShardedWeight, Tensor]]

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the reduced gradients and add them to the gradients of the shards."""
        self.work.wait()
        for weight, output in self.outputs:
            piece = output[: weight.shard.numel()].view(weight.shard.shape)
            if weight.shard.grad is None:
                weight.shard.grad = piece.to(weight.shard.dtype)
            else:
                weight.shard.grad.add_(piece)
            run_hooks(weight.shard)


class LayerCollectives:
    """All-gathers of weights, and reduce-scatters of their gradients.

    Each is of several weights, of one layer and of the same dtype.
    """

    def __init__(self, group_of: GroupOf):
        self._group_of = group_of

    def await_readers(self) -> None:
        """End a pass. There is nothing to wait for."""

    def gather(self, weights: list[ShardedWeight]) -> None:
        """Allocate the memory of unsharded weights, and start to gather them.

        To wait for the results, call `wait` of each weight.

        NCCL starts a collective after the work that is already in the current stream. So an
        all-gather overlaps the computation of the layers before, and may write to memory that an
        earlier layer freed, without another stream or event.
        """
        group = self._group_of()
        inputs, slices, pieces = [], [], []
        for weight in weights:
            weight.allocate()
            piece = weight.shard.detach().view(-1)
            if piece.dtype != weight.flat.dtype or piece.numel() != weight.width:
                # Write the cast and padded shard to this rank's slice of the output, so that the
                # all-gather is in place.
                place = weight.flat.narrow(0, group.rank() * weight.width, weight.width)
                slices.append(place[: piece.numel()])
                pieces.append(piece)
                piece = place
            inputs.append(piece)
        if slices:
            torch._foreach_copy_(slices, pieces)
        gathering = start_gather([weight.flat for weight in weights], inputs, group)
        for weight in weights:
            weight.gathering = gathering

    @torch.no_grad()
    def reduce(self, weights: list[ShardedWeight]) -> Reduction:
        """Start to reduce-scatter the gradients of unsharded weights, averaged over the ranks.

        `unsharded.grad` becomes None. The method `finish` of the result adds the means to the
        gradients of the shards.
        """
        group = self._group_of()
        inputs, outputs = [], []
        for weight in weights:
            flat = weight.take_gradient().reshape(-1)
            if flat.numel() != weight.flat.numel():
                padded = flat.new_zeros(weight.flat.numel())
                padded[: weight.numel] = flat
                flat = padded
            inputs.append(flat)
            outputs.append(flat.new_empty(weight.width))
        options = ReduceScatterOptions()
        options.reduceOp, options.asyncOp = mean_operation(inputs, group), True
        work = group.reduce_scatter_tensor_coalesced(outputs, inputs, options)
        return Reduction(work, inputs, list(zip(weights, outputs, strict=True)))
