"""Fully sharded data parallel: each rank keeps a shard of every large weight, of its gradient and
of its optimizer state; a weight is gathered only while its layer runs.

    model = FullyShardedDataParallel(TransformerLM(...), compute_dtype=torch.bfloat16)
    optimizer = AdamW(model.parameters())           # of the shards, in float32
    cross_entropy(model(tokens), targets).backward()
    model.finish_gradient_synchronization()
    optimizer.step()

Rajbhandari et al. 2020, "ZeRO", section 5.3; Zhao et al. 2023, "PyTorch FSDP", section 3.

A layer is a module with parameters of its own, or one of the classes in `layers` with all of its
submodules. Between steps its modules show the shards. In a step:

    forward     before: gather it and the next two layers, wait for it, show the unsharded weights
                after: show the shards, free it
    backward    when its output's gradient is there: gather it and the two layers before it, wait
                when a weight's gradient is complete: free the weight
                when those of all its weights are: reduce-scatter them, finish earlier ones
    recompute   (activation checkpointing) as in forward, but free it only if backward does not
                need it within the next two layers

The order of layers in forward is that of the last step; in backward, that of this step's forward.
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

PREFETCH_LAYERS = 2  # how many layers ahead weights are gathered
MAX_REDUCE_SCATTERS = 2  # in flight: each holds the unsharded gradients of a layer


def has_matrix(module: nn.Module) -> bool:
    """Return True if the module itself has a parameter `weight` of two or more dimensions, as every
    Linear, Embedding and convolution has."""
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() >= 2


class FullyShardedDataParallel(nn.Module):
    """Wrap `module` and shard its large weights over the ranks, from the values of rank 0.

    Every rank must run the same layers in the same order, on its own data. `parameters()` are this
    rank's shards: a norm of gradients taken over them is of the shards only.

    Args:
        module: the same on every rank up to its values, on its device, frozen where it is not to be
            trained, and compiled where it is to be: a compiled module is a layer with all that is
            beneath it, and transfers stay outside of what is compiled, which is whole graphs. A
            weight is used by calling its module, or a layer that it is beneath.
        compute_dtype: of communication and computation; inputs are cast to it, outputs have it. By
            default each parameter's own. Parameters, their gradients and so the optimizer's state
            are float32 in any case (float64 stays).
        shard: whether a module's `weight` is sharded; all other parameters are replicated.
        layers: classes of modules that are a layer with all that is beneath them, for larger
            transfers: blocks of a Transformer. By default each module with parameters is one.
        process_group: all ranks by default.

    Raises:
        ValueError: parameters or buffers differ across ranks; says on every rank which and where.
        RuntimeError: there is no process group.
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
        self._copies: list[FSDPParameter] = []  # of replicated parameters, cast
        replicated, by_module = self._manage(named, shard)
        self._replicated = GradientAverage(replicated, self._group, self._average)
        self._buckets = fill_buckets(self._replicated.trained, float("inf"))
        self._layers = find_layers(module, layers, by_module)
        for layer in self._layers:
            for weight in layer.reduced:
                hook = partial(self._on_gradient, layer, weight)
                weight.unsharded.register_post_accumulate_grad_hook(hook)
            self._attach(layer)

        self._expected: list[Layer] = []  # order of layers in the last forward
        self._order: list[Layer] = []  # and in this one
        self._backward_order: list[Layer] = []  # in the forward that backward goes through
        self._backward_at = 0  # position in it that backward has come to
        self._reductions: deque[Reduction] = deque()

    def _manage(
        self, named: list[tuple[str, nn.Parameter]], shard: Callable[[nn.Module], bool]
    ) -> tuple[list[tuple[str, nn.Parameter]], dict[nn.Module, list[FSDPParameter]]]:
        """Shard or replicate the parameters; return the replicated ones, and by module those that
        it shows in two forms."""
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
        # A compiler that met storages that come and go would be misled.
        before = torch.compiler.disable(partial(self._before_forward, layer))
        after = torch.compiler.disable(partial(self._after_forward, layer))
        compiled = layer.module._compiled_call_impl
        if compiled is None:
            layer.module.register_forward_pre_hook(
                lambda _, args, kwargs: before(args, kwargs), with_kwargs=True
            )
            layer.module.register_forward_hook(lambda _, args, out: after(out))
            return

        # `module.compile()` compiles a module's hooks with it: go around what it compiled.
        def around(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = before(args, kwargs)
            out = compiled(*args, **kwargs)
            after(out)
            return out

        layer.module._compiled_call_impl = around

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module and return what it returns.

        Raises:
            RuntimeError: a sharded weight was frozen or thawed since the model was wrapped.
        """
        if not _in_backward():  # else this is recomputed for a backward that is under way
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
        """Finish averaging; call it between the last backward and the optimizer's step. Then every
        gradient is the mean over all ranks, in its parameter's shape and dtype. Several backward
        passes before it add up.

        On a GPU the current stream waits and the host does not, unless this rank lacks a gradient
        of a replicated parameter.

        Raises:
            RuntimeError: a rank is gone, or the timeout is over.
        """
        for layer in self._layers:
            self._reduce(layer)  # of layers with weights that this step did not use
        while self._reductions:
            self._reductions.popleft().finish()
        self._take_gradients_of_copies()
        self._replicated.finish()
        self._release_all()
        self._backward_order = []

    @torch.no_grad()
    def gather_full_parameters(self) -> dict[str, Tensor]:
        """Return all parameters, unsharded, in the optimizer's dtype, by their names in `module`
        without the wrapper, which can load them; a tied one under each of its names. A collective,
        to be called between steps."""
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
        """Return the module's own, with this rank's shards; see `gather_full_parameters`."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load what this rank's `state_dict` returned, in a world of the same size."""
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
        """Return the layers to prefetch in a forward that has come to `layer`."""
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
            # Backward begins with the layer that forward ends with.
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
                f"a gradient of shape {tuple(unsharded.shape)} is {unsharded.grad.layout}; only "
                "dense gradients can be sharded: build the embedding with sparse=False"
            )
        # What computes a weight's gradient computes that of its input, too: it is not needed now.
        weight.release()
        if weight not in layer.arrived:  # else from an earlier backward, as part of a layer
            layer.arrived.append(weight)
        if len(layer.arrived) == len(layer.reduced):
            self._reduce(layer)

    def _release_after_backward(self, layer: Layer, args: Any, kwargs: Any) -> None:
        """Free frozen weights, which get no gradient, when the layer's inputs have theirs."""
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
        """Move gradients from the cast copies of replicated parameters to their masters."""
        targets: dict[bool, list[Tensor]] = {True: [], False: []}  # by whether it is the first
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
        """Free all weights, also after a forward without backward or one that an error ended."""
        for weight in self._weights:
            weight.release()
        for copy in self._copies:
            copy.show_shard()

    def _check_trained(self) -> None:
        changed = {w.shard for w in self._weights if w.shard.requires_grad != w.trained}
        if changed:
            names = [name for name, p in self.module.named_parameters() if p in changed]
            raise RuntimeError(
                f"requires_grad changed after the model was wrapped: {', '.join(names)}; "
                "set it before you wrap"
            )

    def _cast(self, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.to(self.compute_dtype)
        return value


def _in_backward() -> bool:
    """Return True if this thread runs a backward pass: a forward in it recomputes."""
    return torch._C._current_graph_task_id() != -1
