"""Fully sharded data parallel (FSDP): weights, gradients and optimizer state are sharded.

Each rank keeps a shard of every large weight, of its gradient and of its optimizer state. A whole
weight is gathered when its layer runs, and freed afterwards.

    model = FullyShardedDataParallel(TransformerLM(...), compute_dtype=torch.bfloat16)
    optimizer = AdamW(model.parameters())           # steps the float32 shards
    cross_entropy(model(tokens), targets).backward()
    model.finish_gradient_synchronization()
    optimizer.step()

Sources: Rajbhandari et al. 2020, "ZeRO", section 5.3; Zhao et al. 2023, "PyTorch FSDP", section 3.

A layer is a group of weights that are all-gathered and freed together. To prefetch a layer means to
start its all-gather before the layer runs. A forward expects the order of layers of the forward
before, so the first one neither prefetches nor keeps a layer.

Between steps, each module holds the shards as its parameters, and the replicated parameters. If
these have copies in the compute dtype, modules hold the copies during forward and during backward.
During a step:

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
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from systems.parallel.buckets import fill_buckets
from systems.parallel.collectives import is_wanted, start_average
from systems.parallel.peer_layers import PeerLayers
from systems.parallel.peer_memory import can_have_peer_memory
from systems.parallel.rank_meetings import LayerOrder
from systems.parallel.sharded_weights import (
    FSDPParameter,
    Layer,
    LayerCollectives,
    Reduction,
    ShardedWeight,
    find_layers,
    master_dtype,
    run_hooks,
)
from systems.parallel.wrapper import (
    DataParallelWrapper,
    gradient_of,
    in_backward,
    not_compiled,
    tensors_in,
    weak_hook,
)

PREFETCH_LAYERS = 2  # number of layers whose weights are gathered ahead
MAX_REDUCTIONS = 2  # number that stays in flight; each holds the unsharded gradients of a layer


def has_matrix(module: nn.Module) -> bool:
    """Return whether the module itself has a parameter `weight` with two or more dimensions."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() >= 2


class FullyShardedDataParallel(DataParallelWrapper):
    """FSDP wrapper: shards the large weights of a module across the ranks.

    All ranks start with the parameters and buffers of rank 0. Every rank must run the same layers
    in the same order, and use the same weights, else a rank raises a RuntimeError that names the
    difference. The modules of a layer have their unsharded weights only while it runs.

    The parameters `weight` of modules are sharded if they have two or more dimensions. The others
    are replicated: every rank has the whole parameter. Persistent buffers get the values of rank 0
    before each forward in training mode, and before the first forward in evaluation mode after it.
    `parameters()` returns the shards of this rank and the replicated parameters. To clip gradients,
    call the method `clip_grad_norm_`. With float16, use torch's `ShardedGradScaler`, which agrees
    over the ranks. `torch.nn.utils.clip_grad_norm_` and `torch.amp.GradScaler` see only one shard.

    Args:
        module: on the device of the process group, the same on all ranks except for the values of
            parameters and buffers. Compile modules before wrapping. A compiled module and all of
            its submodules become one layer. The collectives run before and after the compiled
            code, so they cause no graph breaks. Freeze and cast parameters before.
        compute_dtype: of communication and computation. Floating-point inputs of each layer are
            cast to it, outputs are not. None keeps the dtype of each parameter. Shards and their
            gradients are always float32 (float64 if the parameter is float64).
        layers: classes of modules, for example of the Transformer blocks. Each instance is one
            layer together with all of its submodules. Larger layers mean fewer and larger
            collectives. By default, every module that directly has parameters is a layer. A module
            that uses the weight of a submodule without calling it must be in `layers`. Only its own
            forward may call the submodules of a layer.
        peer_memory: whether the ranks of a host copy weights and gradients through each other's
            memory, on GPUs by copy engines, instead of by collectives (see `peer_layers`). A buffer
            has the shards in compute_dtype and what arrives of the gradients of two layers. Where
            the ranks cannot share memory, they use collectives, with a warning.

    Raises:
        ValueError: on all ranks, if parameters or buffers differ across ranks; the message names
            the rank and the difference. Also if the module is or contains a wrapper, a parameter
            was wrapped before, or an embedding has `max_norm`.
        RuntimeError: if there is no process group.
    """

    sharded = True

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        layers: tuple[type[nn.Module], ...] = (),
        process_group: dist.ProcessGroup | None = None,
        peer_memory: bool = False,
    ):
        super().__init__(module, process_group)
        self.compute_dtype = compute_dtype
        self._weights: list[ShardedWeight] = []
        self._copies: list[FSDPParameter] = []  # replicated parameters with a copy in compute_dtype
        self._keeps_state = True  # whether `state_dict` returns the state on this rank
        by_module = self._manage(list(module.parameters()))
        self._layers = find_layers(module, layers, by_module)
        names = {inner: name or "the module" for name, inner in module.named_modules()}
        for index, layer in enumerate(self._layers):
            self._attach(index, layer)
        # After an error, modules show copies in the compute dtype.
        module.register_state_dict_pre_hook(self._release_all)
        module.register_state_dict_post_hook(partial(self._unshard))
        module.register_load_state_dict_pre_hook(self._shard)
        self._names = {
            index: f"layer {names[layer.module]}" for index, layer in enumerate(self._layers)
        }
        self._forward_order = LayerOrder(self._meetings, "forward", self._names)
        # Ranks that do not use the same weights of a layer would mix up their gradients.
        shards = {weight.shard: weight for weight in self._weights}
        gradients = {
            shards[p]: f"gradient of {name}" for name, p in module.named_parameters() if p in shards
        }
        self._backward_order = LayerOrder(self._meetings, "backward", {**self._names, **gradients})
        # Layers in the order of their forward, as indices in `_layers`, and where backward is in it
        self._reached: tuple[list[int], int] = [], 0
        self._transfers = self._make_transfers(peer_memory)
        self._reductions: deque[Reduction] = deque()
        copies = {copy.shard: copy.unsharded for copy in self._copies}
        trained = [p for p in module.parameters() if p.requires_grad]
        self._replicate([p for p in trained if p not in shards])
        self._buckets = fill_buckets(self._trained, float("inf"))
        self._reduced_by: dict[Tensor, tuple[Layer, ShardedWeight]] = {
            weight.unsharded: (layer, weight) for layer in self._layers for weight in layer.reduced
        }
        self._start([*self._reduced_by, *(copies.get(p, p) for p in self._trained)])

    def _make_transfers(self, peer_memory: bool) -> LayerCollectives | PeerLayers:
        devices = {weight.shard.device for weight in self._weights}
        if peer_memory and devices and can_have_peer_memory(self._group, devices):
            layers = [layer.weights for layer in self._layers]
            return PeerLayers(layers, MAX_REDUCTIONS, self._group)
        return LayerCollectives(self._group_of)

    def _manage(self, parameters: list[nn.Parameter]) -> dict[nn.Module, list[FSDPParameter]]:
        """Shard or replicate each parameter; return the FSDPParameters of each module.

        A replicated parameter has one only if the computation needs a copy of it in another dtype.
        """
        by_module: dict[nn.Module, list[FSDPParameter]] = {}
        for parameter in parameters:
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
            sharded = any(key == "weight" and has_matrix(owner) for owner, key in places)
            if sharded and parameter.numel() and parameter.is_floating_point():
                managed = ShardedWeight(parameter, places, dtype, self._group)
                self._weights.append(managed)
            elif dtype == master_dtype(parameter) == parameter.dtype:
                continue
            else:
                value = parameter.detach()
                copy = nn.Parameter(value.to(dtype, copy=True), parameter.requires_grad)
                parameter.data, parameter.grad = value.to(master_dtype(value)), None
                managed = FSDPParameter(parameter, copy, places)
                self._copies.append(managed)
            for owner, _ in places:
                by_module.setdefault(owner, []).append(managed)
        return by_module

    def _attach(self, index: int, layer: Layer) -> None:
        # The hooks are not compiled, because they free and resize storages, and torch.compile does
        # not support this. They are bound methods, so that a copy of the module copies the wrapper,
        # which refuses.
        before, after = partial(self._before_forward, index), partial(self._after_forward, index)
        compiled = layer.module._compiled_call_impl
        if compiled is None:
            # Hooks of the user see the whole weights, and inputs that are not cast yet.
            layer.module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
            if self.compute_dtype is not None:
                layer.module.register_forward_pre_hook(self._cast_inputs, with_kwargs=True)
            layer.module.register_forward_hook(after, with_kwargs=True)
            return

        # `module.compile()` also compiles the hooks of the module. So this wraps the compiled call.
        def around(*args: Any, **kwargs: Any) -> Any:
            before(layer.module, args, kwargs)
            if self.compute_dtype is not None:
                args, kwargs = self._cast_inputs(layer.module, args, kwargs)
            out = compiled(*args, **kwargs)
            after(layer.module, args, kwargs, out)
            return out

        layer.module._compiled_call_impl = around

    # ---- state -----------------------------------------------------------------------------------

    @torch.no_grad()
    def gather_full_parameters(self) -> dict[str, Tensor]:
        """Return all parameters by name, unsharded, in the dtype of the shards.

        The names are those in the unwrapped module, which can load the result as a state dict. A
        parameter that is tied appears under each of its names. Buffers are not included. All ranks
        must call this function, at a time when none of them is in forward or backward.

        Raises:
            RuntimeError: if a rank does not call it within the timeout of the process group. A
                warning names the missing ranks after 5 s.
        """
        self._meetings.meet(self._group, "gather_full_parameters()")
        self._release_all()  # an exception may have left unsharded weights in the modules
        full = {name: whole for names, whole in self._gather_all() for name in names}
        named = self.module.named_parameters(remove_duplicate=False)
        return {name: full[name] if name in full else p.detach().clone() for name, p in named}

    def _gather_all(self) -> Iterator[tuple[list[str], Tensor]]:
        """Gather the sharded weights one at a time. Yield the names and the value of each."""
        names: dict[Tensor, list[str]] = {}
        for name, p in self.module.named_parameters(remove_duplicate=False):
            names.setdefault(p, []).append(name)
        for weight in self._weights:
            yield names[weight.shard], weight.gather(weight.shard.detach(), self._group)

    def state_dict(self, *args: Any, to: int | None = None, **kwargs: Any) -> Any:
        """Return the state dict of the module, with unsharded parameters on the CPU.

        The names are those in the unwrapped module. It, any other wrapper, and torch's own can load
        the result, with any number of ranks. All ranks must call this method. If `to` is a rank,
        the result is empty on the others.

        Raises:
            RuntimeError: as `gather_full_parameters`.
            ValueError: if `to` is no rank of the process group.
        """
        self._keeps_state = is_wanted(to, self._group)
        try:
            states = self.module.state_dict(*args, **kwargs)
            if not self._keeps_state:
                states.clear()
        finally:
            self._keeps_state = True
        return states

    @torch.no_grad()
    def _unshard(self, _: nn.Module, states: dict[str, Any], prefix: str, metadata: Any) -> None:
        """Replace the shards in a state dict by whole weights. A hook of the module."""
        self._meetings.meet(self._group, "state_dict()")
        for names, whole in self._gather_all():
            if self._keeps_state:
                on_cpu = whole.to("cpu", copy=True)  # so that a GPU never has all weights
                states.update((prefix + name, on_cpu) for name in names)
        for name, value in states.items():
            if name.startswith(prefix) and isinstance(value, Tensor):
                states[name] = value.detach().cpu()

    def _shard(
        self,
        _: nn.Module,
        states: dict[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        *args: Any,
    ) -> None:
        """Replace the whole weights in a state dict by shards. A hook of the module."""
        if metadata.get("assign_to_params_buffers"):
            raise TypeError("FSDP cannot load with assign=True, which would replace its shards")
        self._release_all()
        errors = args[-1]
        weights = {weight.shard: weight for weight in self._weights}
        for name, p in self.module.named_parameters(remove_duplicate=False):
            key = prefix + name
            if p not in weights or not isinstance(states.get(key), Tensor):
                continue
            given, whole = states[key].shape, weights[p].shape
            if given == whole:
                states[key] = weights[p].piece_of(states[key])
            else:
                errors.append(f"{key} must have shape {tuple(whole)}, got {tuple(given)}")
                states[key] = p

    def optimizer_state_dict(self, optimizer: Optimizer, to: int | None = None) -> dict[str, Any]:
        """Return the state of an optimizer of `parameters()`, unsharded, with tensors on the CPU.

        The result is that of an optimizer of the unwrapped module, which can load it. So can
        `load_optimizer_state_dict`, with any number of ranks. All ranks must call this method. If
        `to` is a rank, "state" is empty on the others.

        Raises:
            RuntimeError: as `gather_full_parameters`.
            ValueError: if `to` is no rank of the process group.
        """
        wanted = is_wanted(to, self._group)
        self._meetings.meet(self._group, "optimizer_state_dict()")
        states = optimizer.state_dict()
        unsharded: dict[int, dict[str, Any]] = {}
        for index, weight, values in self._optimizer_states(optimizer, states):
            whole = {}
            for name, value in values.items():
                if isinstance(value, Tensor):
                    if weight is not None and value.shape == weight.shard.shape:
                        value = weight.gather(value, self._group)
                    value = value.to("cpu", copy=True) if wanted else None
                whole[name] = value
            unsharded[index] = whole
        return {**states, "state": unsharded if wanted else {}}

    def load_optimizer_state_dict(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Load unsharded state into an optimizer of `parameters()`. Each rank keeps its shards.

        The state dict is of `optimizer_state_dict`, with any number of ranks, or of an optimizer of
        the unwrapped module, with the same parameters in the same order.
        """
        pieces = {}
        for index, weight, values in self._optimizer_states(optimizer, state_dict):
            pieces[index] = {
                name: weight.piece_of(value).clone()
                if weight is not None and isinstance(value, Tensor) and value.shape == weight.shape
                else value
                for name, value in values.items()
            }
        optimizer.load_state_dict({**state_dict, "state": pieces})

    def _optimizer_states(
        self, optimizer: Optimizer, states: dict[str, Any]
    ) -> Iterator[tuple[int, ShardedWeight | None, dict[str, Any]]]:
        """Yield the index, the sharded weight, if it is one, and the state of each parameter."""
        weights = {weight.shard: weight for weight in self._weights}
        for group, saved in zip(optimizer.param_groups, states["param_groups"], strict=True):
            for parameter, index in zip(group["params"], saved["params"], strict=True):
                if index in states["state"]:
                    yield index, weights.get(parameter), states["state"][index]

    def _sharded_parameters(self) -> set[nn.Parameter]:
        return {weight.shard for weight in self._weights}

    # ---- a step ----------------------------------------------------------------------------------

    def _run(self, inputs: Any, kwargs: Any) -> Any:
        if self.compute_dtype is not None:
            inputs, kwargs = self._cast((inputs, kwargs))
        return self.module(*inputs, **kwargs)

    @not_compiled
    def _begin_forward(self) -> None:
        self._refuse_after_error()
        self._release_all()
        super()._begin_forward()
        _refresh(self._copies)
        self._show_copies()
        self._forward_order.begin()

    @not_compiled
    def _end_forward(self, output: Any) -> None:
        self._forward_order.end(self._group)
        self._hide_copies()
        if not torch.is_grad_enabled():  # no backward will end the pass
            self._release_all()
        super()._end_forward(output)

    @not_compiled
    def _before_forward(self, index: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        layer = self._layers[index]
        if self._is_alone():
            self._refuse_after_error()
            _refresh(layer.copies)
            for copy in layer.copies:
                copy.show_unsharded()
            for weight in layer.weights:
                weight.release_old()
        if layer.weights:
            self._gather(index, self._enter(index))
            if layer.frozen and torch.is_grad_enabled() and not in_backward():
                self._release_after_backward(index, args, kwargs)
        for weight in layer.weights:
            weight.show_unsharded()

    @not_compiled
    def _cast_inputs(self, _: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return tuple(map(self._cast, args)), {name: self._cast(kwargs[name]) for name in kwargs}

    def _enter(self, index: int) -> list[int]:
        """Note that a layer's forward or recomputation starts; return the layers to prefetch."""
        layer = self._layers[index]
        if in_backward():
            backward_order, at = self._reached
            after = layer.position + 1
            return backward_order[after : min(after + PREFETCH_LAYERS, at)]
        order = self._forward_order
        layer.position = at = len(order.visited)
        if self._in_forward:
            order.visit(self._group, index)
        else:  # a part of the module was called on its own
            order.visited.append(index)
        expected = order.expected[at : at + PREFETCH_LAYERS + 1]
        return expected[1:] if expected[:1] == [index] else []

    @not_compiled
    def _after_forward(self, index: int, _: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        layer = self._layers[index]
        if self._is_alone():
            for copy in layer.copies:
                copy.show_shard()
        if not layer.weights:
            return
        if not layer.is_reached:
            for weight in layer.weights:
                weight.show_shard()
        if any(weight.was_changed for weight in layer.weights):
            raise RuntimeError(
                f"forward of {self._names[index]} has changed its weight in place, and FSDP frees "
                "the whole weight after it; change parameters() between steps"
            )
        order, position = self._forward_order.visited, layer.position
        if in_backward():
            backward_order, at = self._reached
            order = backward_order or order
            is_near = bool(backward_order) and at - PREFETCH_LAYERS <= position <= at
            # What backward has reached, it reads without another call of `_before_backward`.
            keep = layer.is_reached or is_near
        else:
            # Keep the last layer of forward, because backward starts with it.
            keep = torch.is_grad_enabled() and self._forward_order.expected[-1:] == [index]
        if order[position : position + 1] != [index]:  # recomputed after another forward
            order, position = [index], 0
        tensors = tensors_in(out)
        # To read is_leaf also renews a view of what was changed. Else register_hook may crash.
        outputs = [tensor for tensor in tensors if not tensor.is_leaf]
        hook = weak_hook(self._before_backward, order, position)
        for tensor in _where_to_hook(outputs, args, kwargs):
            tensor.register_hook(hook)
        # If the output hides its tensors, no hook can gather the layer before its backward.
        if not keep and (tensors or not torch.is_grad_enabled()):
            for weight in layer.weights:
                weight.release()

    def _before_backward(self, order: list[int], position: int, grad: Tensor) -> None:
        self._notice_backward()
        self._open = True
        index = order[position]
        self._backward_order.visit(self._group, index)
        self._reached, self._layers[index].is_reached = (order, position), True
        self._gather(index, order[max(0, position - PREFETCH_LAYERS) : position][::-1])
        for weight in self._layers[index].weights:
            weight.show_unsharded()  # for checkpoints inside the layer

    def _gather(self, index: int, ahead: list[int]) -> None:
        for each in (index, *ahead):
            for alike in self._layers[each].alike:
                missing = [weight for weight in alike if not weight.gathered]
                if missing:
                    self._transfers.gather(missing)
        for weight in self._layers[index].weights:
            weight.wait()

    def _begin_backward(self) -> None:
        self._show_copies()
        self._backward_order.begin()

    def _end_backward(self) -> None:
        self._hide_copies()
        super()._end_backward()

    def _show_copies(self) -> None:
        """Let all modules compute with the copies, which always have memory.

        Between forward and backward the modules have the parameters, see `parameters()`.
        """
        for copy in self._copies:
            copy.show_unsharded()

    def _hide_copies(self) -> None:
        for copy in self._copies:
            copy.show_shard()

    def _is_alone(self) -> bool:
        """Return whether no forward and backward of this wrapper are known to run.

        A layer may be called by the user then, or run again in a backward that has not reached an
        output of the wrapper yet.
        """
        return not self._in_forward and (self._backward is None or not in_backward())

    def _on_gradient(self, index: int, parameter: Tensor) -> None:
        if parameter not in self._reduced_by:  # it is replicated
            return
        layer, weight = self._reduced_by[parameter]
        # One operation computes the gradient of a weight and the gradient of the layer input, so
        # backward does not need the weight any more.
        weight.release()
        layer.arrived.add(weight)
        if len(layer.arrived) == len(layer.reduced):
            self._reduce(layer)

    def _release_after_backward(self, index: int, args: Any, kwargs: Any) -> None:
        """Let backward free the frozen weights of a layer when it does not need them any more.

        They are needed until the gradients of the layer's inputs are ready. A weight that is
        trained is freed when its own gradient is ready, but a frozen weight has no gradient.
        """
        inputs = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
        if any(tensor.is_leaf for tensor in inputs):
            return  # the hooks of a leaf stay, and would run in the backward of later steps
        awaited = {id(tensor) for tensor in inputs}
        place = self._forward_order.visited, self._layers[index].position
        for tensor in inputs:
            hook = weak_hook(self._release_frozen, index, place, awaited, id(tensor))
            tensor.register_hook(hook)

    def _release_frozen(
        self, index: int, place: tuple[list[int], int], awaited: set[int], key: int, grad: Tensor
    ) -> None:
        awaited.discard(key)
        if awaited:
            return
        needed: list[ShardedWeight] = []
        order, at = self._reached
        # Backward may have reached the layer that made the input, also of an earlier forward.
        if order and not (order is place[0] and at == place[1]):
            needed = self._layers[order[at]].weights
        for weight in self._layers[index].frozen:
            if weight not in needed:
                weight.release()

    def _reduce(self, layer: Layer) -> None:
        for alike in layer.alike:
            weights = [weight for weight in alike if weight in layer.arrived]
            for weight in weights:
                self._backward_order.visit(self._group, weight)
            if weights:
                self._reductions.append(self._transfers.reduce(weights))
        layer.arrived.clear()
        while len(self._reductions) > MAX_REDUCTIONS:
            self._reductions.popleft().finish()

    def _complete(self) -> None:
        self._reached = [], 0
        for layer in self._layers:
            layer.is_reached = False
            if layer.arrived:  # some of its weights were not used
                self._reduce(layer)
        if self._open:  # not in a step without backward
            self._backward_order.end(self._group)
        while self._reductions:
            self._reductions.popleft().finish()
        self._take_gradients_of_copies()
        self._average_replicated()
        self._release_all()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Do nothing: gradients are right, but no communication is saved.

        Every backward adds its means to the gradients of the shards, so no rank keeps whole ones.
        All ranks must run equally many backward passes.
        """
        yield

    def _average(self) -> None:
        for bucket in self._buckets:
            start_average([gradient_of(parameter) for parameter in bucket], self._group).wait()

    @torch.no_grad()
    def _take_gradients_of_copies(self) -> None:
        """Add the gradients of copies in another dtype to those of the replicated parameters."""
        copies: list[Any] = [copy for copy in self._copies if copy.unsharded.grad is not None]
        new = [copy for copy in copies if copy.shard.grad is None]
        for copy in new:
            copy.shard.grad = torch.empty_like(copy.shard)
        if new:
            torch._foreach_zero_([copy.shard.grad for copy in new])
        if copies:
            gradients = [gradient_of(copy.unsharded) for copy in copies]
            torch._foreach_add_([copy.shard.grad for copy in copies], gradients)
        for copy in copies:
            copy.unsharded.grad = None
            run_hooks(copy.shard)

    def _release_all(self, *_: Any) -> None:
        """Free weights that an error, or a forward without backward, has left unsharded."""
        for weight in self._weights:
            weight.release()
        self._transfers.await_readers()
        self._hide_copies()

    def _cast(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return tree_map_only(Tensor, self._cast, value)
        return value.to(self.compute_dtype) if value.is_floating_point() else value


def _where_to_hook(outputs: list[Tensor], args: Any, kwargs: Any) -> list[Tensor]:
    """Return the outputs of a layer, but for a view the tensor of which it is a view.

    If a view is changed in place later, autograd forgets its hooks, but not those of its base. The
    gradient of a base that is an input, or that has no function, comes too late.
    """
    if not any(tensor._is_view() for tensor in outputs):
        return outputs
    inputs = tensors_in((args, kwargs))
    outside = {id(each) for tensor in inputs for each in (tensor, tensor._base)}
    found: dict[int, Tensor] = {}
    for tensor in outputs:
        base = tensor._base
        if base is not None and base.grad_fn is not None and id(base) not in outside:
            tensor = base
        found[id(tensor)] = tensor
    return list(found.values())


def _refresh(copies: list[FSDPParameter]) -> None:
    """Give the copies of replicated parameters their present values.

    `.data` has a separate version counter. If the values have not changed since a forward whose
    backward is still to come, autograd must not report a modification.
    """
    if copies:
        targets = [copy.unsharded.data for copy in copies]
        torch._foreach_copy_(targets, [copy.shard.detach() for copy in copies])
