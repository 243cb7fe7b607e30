"""Fully sharded data parallel (FSDP): weights, gradients and optimizer state are sharded.

Each rank keeps a shard of every large weight, of its gradient and of its optimizer state. A whole
weight is gathered when its layer runs, and freed afterwards.

    model = FullyShardedDataParallel(TransformerLM(...), compute_dtype=torch.bfloat16)
    optimizer = AdamW(model.parameters())           # steps the float32 shards
    cross_entropy(model(tokens), targets).backward()
    model.finish_gradient_synchronization()
    optimizer.step()

Sources: Rajbhandari et al. 2020, "ZeRO", section 5.3; Zhao et al. 2023, "PyTorch FSDP", section 3.

A layer is a group of weights that are gathered and freed together. By default, every module that
directly has parameters is one layer. With the argument `layers`, a large module, for example a
Transformer block, is one layer together with all of its submodules. To gather a layer means to
all-gather its weights. To prefetch a layer means to start its all-gather before the layer runs.

Between steps, each module holds the shards as its parameters. During a step:

    before the forward of a layer
        Gather the layer and prefetch the next two layers. Wait for the gather of the layer. Replace
        the shards in the modules by the unsharded weights.
    after the forward of a layer
        Put the shards back into the modules. Free the unsharded weights. Only the last layer keeps
        its unsharded weights, because backward starts with this layer.
    in backward, when the gradient of the output of a layer is ready
        Gather the layer, and prefetch the two layers that come next in backward. Wait for the
        gather of the layer.
    when the gradient of a weight is complete
        Free the unsharded weight.
    when the gradients of all weights of a layer are complete
        Start to reduce-scatter them. If more than two reduce-scatters are in flight, wait for the
        oldest.
    when backward runs the forward of a layer again (activation checkpointing)
        Do the same as before and after the forward. But keep the unsharded weights if backward has
        reached this layer or is at most two layers away from it.

Prefetching needs the order in which the layers will run. Forward is expected to run the layers in
the order of the previous forward. Backward is expected to run the layers of the current forward in
reverse order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from systems.parallel.buckets import fill_buckets
from systems.parallel.collectives import (
    broadcast_from_first,
    group_or_world,
    start_average,
    start_gather,
)
from systems.parallel.ddp import GradientAverage
from systems.parallel.rank_consistency import check_agreement
from systems.parallel.sharded_weights import (
    FSDPParameter,
    Layer,
    Reduction,
    ShardedWeight,
    find_layers,
    gather_weights,
    master_dtype,
    reduce_gradients,
)

PREFETCH_LAYERS = 2  # number of layers whose weights are gathered ahead
MAX_REDUCE_SCATTERS = 2  # maximum number in flight; each holds the unsharded gradients of a layer


def has_matrix(module: nn.Module) -> bool:
    """Return True if the module has a parameter named `weight` with two or more dimensions.

    Linear, Embedding and convolution layers have such a parameter. Submodules are not searched.
    """
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() >= 2


class FullyShardedDataParallel(nn.Module):
    """FSDP wrapper: shards the large weights of a module across the ranks.

    All ranks start with the parameters and buffers of rank 0. Every rank must run the same layers
    in the same order, each on a different part of the batch. A layer is a group of weights that
    are gathered and freed together. Its modules have their unsharded weights only while it runs.

    Parameters that are not sharded are replicated: every rank has the whole parameter.
    `parameters()` returns the shards of this rank and the replicated parameters. A gradient norm
    over `parameters()` therefore does not include the shards of other ranks.

    Args:
        module: on the device of the process group, the same on all ranks except for the values of
            parameters and buffers. Freeze parameters and compile modules before wrapping. A
            compiled module and all of its submodules become one layer. The collectives run before
            and after the compiled code, so they cause no graph breaks.
        compute_dtype: of communication and computation. Floating-point inputs are cast to it, and
            outputs have it. None keeps the dtype of each parameter. Shards and their gradients are
            always float32 (float64 if the parameter is float64).
        shard: function that returns True for a module whose parameter `weight` is to be sharded.
            All other parameters are replicated.
        layers: classes of modules, for example of the Transformer blocks. Each instance is one
            layer together with all of its submodules. Larger layers mean fewer and larger
            collectives. By default, every module that directly has parameters is a layer.

    Raises:
        ValueError: on all ranks, if parameters or buffers differ across ranks; the message names
            the rank and the difference.
        RuntimeError: if there is no process group.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        shard: Callable[[nn.Module], bool] = has_matrix,
        layers: tuple[type[nn.Module], ...] = (),
        process_group: dist.ProcessGroup | None = None,
    ):
        super().__init__()
        self.module, self.compute_dtype = module, compute_dtype
        self._group = group_or_world(process_group)
        named = list(module.named_parameters())
        check_agreement([*named, *module.named_buffers()], self._group)
        broadcast_from_first([*module.parameters(), *module.buffers()], self._group)

        self._weights: list[ShardedWeight] = []
        self._copies: list[FSDPParameter] = []  # replicated parameters with a copy in compute_dtype
        replicated, by_module = self._manage(named, shard)
        self._replicated = GradientAverage(replicated, self._group, self._average)
        self._buckets = fill_buckets(self._replicated.trained, float("inf"))
        self._layers = find_layers(module, layers, by_module)
        for layer in self._layers:
            for weight in layer.reduced:
                hook = partial(self._on_gradient, layer, weight)
                weight.unsharded.register_post_accumulate_grad_hook(hook)
            self._attach(layer)

        self._expected: list[Layer] = []  # order of layers in the previous forward
        self._order: list[Layer] = []  # order of layers in the current forward
        self._backward_order: list[Layer] = []  # order in the forward of the current backward
        self._backward_at = 0  # index in _backward_order of the layer that backward has reached
        self._reductions: deque[Reduction] = deque()

    def _manage(
        self, named: list[tuple[str, nn.Parameter]], shard: Callable[[nn.Module], bool]
    ) -> tuple[list[tuple[str, nn.Parameter]], dict[nn.Module, list[FSDPParameter]]]:
        """Shard or replicate each parameter.

        Returns the (name, parameter) pairs of the replicated parameters, and the FSDPParameters of
        each module: one for each sharded weight, and one for each replicated parameter that needs a
        copy in another dtype (float32 for the optimizer, or compute_dtype for the computation).
        """
        replicated: list[tuple[str, nn.Parameter]] = []
        by_module: dict[nn.Module, list[FSDPParameter]] = {}
        for name, parameter in named:
            places = [
                (owner, key)
                for owner in self.module.modules()
                for key, value in owner._parameters.items()
                if value is parameter
            ]
            dtype = parameter.dtype
            if self.compute_dtype is not None and dtype.is_floating_point:
                dtype = self.compute_dtype
            managed: FSDPParameter
            sharded = any(key == "weight" and shard(owner) for owner, key in places)
            if sharded and parameter.numel():
                managed = ShardedWeight(parameter, places, dtype, self._group)
                self._weights.append(managed)
            elif dtype == master_dtype(parameter) == parameter.dtype:
                replicated.append((name, parameter))
                continue
            else:
                value, trained = parameter.detach(), parameter.requires_grad
                master = nn.Parameter(value.to(master_dtype(value)), trained)
                copy = nn.Parameter(value.to(dtype, copy=True), trained)
                managed = FSDPParameter(master, copy, places)
                self._copies.append(managed)
                replicated.append((name, master))
            for owner, _ in places:
                by_module.setdefault(owner, []).append(managed)
        return replicated, by_module

    def _attach(self, layer: Layer) -> None:
        # The hooks are not compiled, because they free and resize storages, and torch.compile does
        # not support this.
        before = torch.compiler.disable(partial(self._before_forward, layer))
        after = torch.compiler.disable(partial(self._after_forward, layer))
        compiled = layer.module._compiled_call_impl
        if compiled is None:
            layer.module.register_forward_pre_hook(
                lambda _, args, kwargs: before(args, kwargs), with_kwargs=True
            )
            layer.module.register_forward_hook(lambda _, args, out: after(out))
            return

        # `module.compile()` also compiles the hooks of the module. So this wraps the compiled call.
        def around(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = before(args, kwargs)
            out = compiled(*args, **kwargs)
            after(out)
            return out

        layer.module._compiled_call_impl = around

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module and return its output.

        Raises:
            RuntimeError: if requires_grad of a sharded weight changed after wrapping.
        """
        if not _in_backward():  # otherwise this forward is a recomputation
            self._check_trained()
            self._release_all()
            self._take_gradients_of_copies()
            if self._copies:
                with torch.no_grad():
                    torch._foreach_copy_(
                        [copy.unsharded for copy in self._copies],
                        [copy.shard for copy in self._copies],
                    )
            self._expected, self._order = self._order, []
        if self.compute_dtype is not None:
            inputs, kwargs = tree_map(self._cast, (inputs, kwargs))
        return self.module(*inputs, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Finish averaging, so that every gradient is the mean over all ranks.

        Call it after the last backward and before the step of the optimizer. Gradients of several
        backward passes are added. The gradient of a shard has the shape and dtype of the shard. The
        gradient of a replicated parameter has the shape and dtype of this parameter.

        On a GPU, the current stream waits for the communication. The host blocks only if a
        replicated parameter has no gradient on this rank.

        Raises:
            RuntimeError: if a rank has exited, the timeout has expired, or a replicated parameter
                was frozen when the module was wrapped and is now trainable.
        """
        for layer in self._layers:
            self._reduce(layer)  # for layers in which some weights were not used
        while self._reductions:
            self._reductions.popleft().finish()
        self._take_gradients_of_copies()
        self._replicated.finish()
        self._release_all()
        self._backward_order = []

    @torch.no_grad()
    def gather_full_parameters(self) -> dict[str, Tensor]:
        """Return all parameters by name, unsharded, in the dtype of the shards.

        The names are those in the unwrapped module, which can load the result as a state dict. A
        parameter that is tied appears under each of its names. Buffers are not included. All ranks
        must call this function, at a time when none of them is in forward or backward.
        """
        full: dict[Tensor, Tensor] = {}
        for weight in self._weights:
            piece = weight.shard.new_zeros(weight.width)
            piece[: weight.shard.numel()] = weight.shard
            flat = piece.new_empty(self._group.size() * weight.width)
            start_gather([flat], [piece], self._group).wait()
            full[weight.shard] = flat[: weight.numel].view(weight.shape)
        return {
            name: full[parameter] if parameter in full else parameter.detach().clone()
            for name, parameter in self.module.named_parameters(remove_duplicate=False)
        }

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the wrapped module.

        It contains only the shards of this rank. To get unsharded parameters, call
        `gather_full_parameters`.
        """
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the shards of this rank from a state dict.

        The state dict must be one that `state_dict` returned on the same rank, with the same number
        of ranks.
        """
        return self.module.load_state_dict(*args, **kwargs)

    # ---- a step ----------------------------------------------------------------------------------

    def _before_forward(self, layer: Layer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if layer.weights:
            self._gather(layer, self._next_layers(layer))
            if layer.frozen and torch.is_grad_enabled() and not _in_backward():
                self._release_after_backward(layer, args, kwargs)
        for parameter in layer.parameters:
            parameter.show_unsharded()
        if self.compute_dtype is not None:
            args = tuple(map(self._cast, args))
            kwargs = {name: self._cast(value) for name, value in kwargs.items()}
        return args, kwargs

    def _next_layers(self, layer: Layer) -> list[Layer]:
        """Return the layers to prefetch when the forward of `layer` starts.

        The forward may be a recomputation in backward (activation checkpointing).
        """
        if _in_backward():
            after = layer.position + 1
            return self._backward_order[after : min(after + PREFETCH_LAYERS, self._backward_at)]
        layer.position = len(self._order)
        self._order.append(layer)
        expected = self._expected[layer.position : layer.position + PREFETCH_LAYERS + 1]
        return expected[1:] if expected[:1] == [layer] else []

    def _after_forward(self, layer: Layer, out: Any) -> None:
        for parameter in layer.parameters:
            parameter.show_shard()
        if _in_backward():
            order, at = self._backward_order or self._order, self._backward_at
            keep = bool(self._backward_order) and at - PREFETCH_LAYERS <= layer.position <= at
        else:
            # Keep the last layer of forward, because backward starts with it.
            order = self._order
            keep = torch.is_grad_enabled() and self._expected[-1:] == [layer]
        hook = partial(self._before_backward, order, layer.position)
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.requires_grad and layer.weights:
                tensor.register_hook(hook)
        if not keep:
            for weight in layer.weights:
                weight.release()

    def _before_backward(self, order: list[Layer], position: int, grad: Tensor) -> None:
        self._backward_order, self._backward_at = order, position
        self._gather(order[position], order[max(0, position - PREFETCH_LAYERS) : position][::-1])

    def _gather(self, layer: Layer, ahead: list[Layer]) -> None:
        gather_weights(layer.weights, self._group)
        for other in ahead:
            gather_weights(other.weights, self._group)
        for weight in layer.weights:
            weight.wait()

    def _on_gradient(self, layer: Layer, weight: ShardedWeight, unsharded: Tensor) -> None:
        assert unsharded.grad is not None
        if unsharded.grad.layout is not torch.strided:
            raise RuntimeError(
                f"gradients must be dense, got {unsharded.grad.layout} of shape "
                f"{tuple(unsharded.shape)}; build the embedding with sparse=False"
            )
        # One operation computes the gradient of a weight and the gradient of the layer input, so
        # backward does not need the weight any more.
        weight.release()
        # The weight is already in the list if an earlier backward used only a part of the layer.
        if weight not in layer.arrived:
            layer.arrived.append(weight)
        if len(layer.arrived) == len(layer.reduced):
            self._reduce(layer)

    def _release_after_backward(self, layer: Layer, args: Any, kwargs: Any) -> None:
        """Let backward free the frozen weights of a layer when it does not need them any more.

        Frozen weights are needed until the gradients of the layer's inputs are ready. A weight that
        is trained is freed when its own gradient is ready, but a frozen weight has no gradient. The
        hooks are added to the inputs that require a gradient.
        """
        inputs = [
            tensor
            for tensor in tree_leaves((args, kwargs))
            if isinstance(tensor, Tensor) and tensor.requires_grad
        ]
        awaited = {id(tensor) for tensor in inputs}

        def release(key: int, grad: Tensor) -> None:
            awaited.discard(key)
            if not awaited:
                for weight in layer.frozen:
                    weight.release()

        for tensor in inputs:
            tensor.register_hook(partial(release, id(tensor)))

    def _reduce(self, layer: Layer) -> None:
        if layer.arrived:
            self._reductions += reduce_gradients(layer.arrived, self._group)
            layer.arrived = []
        while len(self._reductions) > MAX_REDUCE_SCATTERS:
            self._reductions.popleft().finish()

    def _average(self) -> None:
        for bucket in self._buckets:
            start_average([p.grad for p in bucket if p.grad is not None], self._group).wait()

    @torch.no_grad()
    def _take_gradients_of_copies(self) -> None:
        """Add the gradients of parameter copies to the gradients of the replicated parameters.

        If a replicated parameter has another dtype than the computation, the modules use a copy of
        the parameter in the dtype of the computation. Backward computes the gradient of the copy.
        This method sets the gradient of the copy to None afterwards.
        """
        # Key True: the replicated parameter has no gradient yet. Key False: it has one, so add.
        targets: dict[bool, list[Tensor]] = {True: [], False: []}
        gradients: dict[bool, list[Tensor]] = {True: [], False: []}
        for copy in self._copies:
            if copy.unsharded.grad is None:
                continue
            first = copy.shard.grad is None
            if copy.shard.grad is None:
                copy.shard.grad = torch.empty_like(copy.shard)
            targets[first].append(copy.shard.grad)
            gradients[first].append(copy.unsharded.grad)
            copy.unsharded.grad = None
        if targets[True]:
            torch._foreach_copy_(targets[True], gradients[True])
        if targets[False]:
            torch._foreach_add_(targets[False], gradients[False])

    def _release_all(self) -> None:
        """Free all unsharded weights and put the shards back into the modules.

        After an error, or after a forward without backward, some weights are still unsharded.
        """
        for weight in self._weights:
            weight.release()
        for copy in self._copies:
            copy.show_shard()

    def _check_trained(self) -> None:
        changed = {w.shard for w in self._weights if w.shard.requires_grad != w.trained}
        if changed:
            names = [name for name, p in self.module.named_parameters() if p in changed]
            raise RuntimeError(
                "requires_grad must not change after the model was wrapped, but it did for "
                f"{', '.join(names)}; set it before wrapping"
            )

    def _cast(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(self.compute_dtype)
        return value


def _in_backward() -> bool:
    """Return True while this thread runs a backward pass.

    A forward that runs during backward is a recomputation of activation checkpointing.
    """
    return torch._C._current_graph_task_id() != -1
