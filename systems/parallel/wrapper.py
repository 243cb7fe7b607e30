"""Base class of the DDP and FSDP wrappers: owner of their hooks, their state and their steps.

    forward     refuse parameters that have changed, broadcast buffers, and run the module
                hook the outputs, so that the wrapper notices when backward starts and ends
    backward    a hook of each parameter tells that its gradient is complete
                at the end, finish the averages of all gradients
    finish_gradient_synchronization
                average what backward did not: gradients of `no_sync`, or of a rank without backward

So gradients are averages when backward returns, as with torch's DistributedDataParallel. A wrapper
cannot be copied, and refuses to run after an error or with changed parameters.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from systems.parallel.collectives import GroupOf, broadcast_from_first
from systems.parallel.rank_consistency import check_agreement
from systems.parallel.rank_meetings import Meetings

Method = TypeVar("Method", bound=Callable[..., Any])
# parameter -> class of its wrapper. An attribute of the parameter would be pickled with it.
_WRAPPED: Any = WeakIdKeyDictionary()
_TRAINED, _DTYPE = attrgetter("requires_grad"), attrgetter("dtype")
_OWN = "_of_data_parallel_wrapper"  # attribute of gradients


def not_compiled(method: Method) -> Method:
    """Return a method that torch.compile calls as it is, if a wrapper is compiled."""
    disabled: Any = torch.compiler.disable(method)
    return cast(Method, disabled)


class DataParallelWrapper(nn.Module):
    """Base class of the wrappers. Subclasses define how gradients are averaged.

    For arguments and errors, see `DataParallel` and `FullyShardedDataParallel`. The constructors of
    subclasses call `_replicate` and then `_start`.
    """

    sharded = False  # whether parameters are shards

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None):
        super().__init__()
        self.module = module
        self._group_of = GroupOf(process_group)
        tensors = [*module.named_parameters(), *module.named_buffers()]
        number = check_agreement(tensors, self._group, _refusal(module))
        broadcast_from_first([*module.parameters(), *module.buffers()], self._group)
        self._meetings = Meetings(str(number))
        # Passes that have begun and not ended. After an error they never end.
        self._in_forward = False
        self._backward: int | None = None  # id of the backward pass in progress
        # Gradients
        self._synchronizing = True  # False in `no_sync`
        self._open = False  # the backward in progress has reached a layer or a gradient
        # One of the gradients that the last backward has averaged, as (parameter, reference to the
        # gradient, version), or () if this rank owns none. None: they are not averaged.
        self._averaged: tuple[Any, ...] | None = None
        # Buffers
        self._has_buffers = any(True for _ in _persistent_buffers(module))
        self._buffers_differ = False  # a forward in training mode may have changed them
        self._sent_buffers = False  # for a training forward whose gradients are not averaged

    @property
    def _group(self) -> dist.ProcessGroup:
        return self._group_of()

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module and return its output.

        Raises:
            RuntimeError: if a forward or backward before ended with an error, or if a parameter or
                module was frozen, thawed, cast or replaced since the wrapper was made.
        """
        if in_backward():  # a recomputation of activation checkpointing
            return self._run(inputs, kwargs)
        self._begin_forward()
        output = self._run(inputs, kwargs)
        self._end_forward(output)
        return output

    def finish_gradient_synchronization(self) -> None:
        """Finish averaging, so that every `grad` is the mean over all ranks.

        Backward already averages the gradients. This method averages those that were accumulated
        under `no_sync`, and those of a rank that ran no backward, which contributes zeros. It may
        be called between backward and the step of the optimizer in any case. All ranks must call
        it in the same steps.

        A parameter that no rank used keeps `grad` None. On a GPU, the current stream waits for the
        communication. The host blocks only if this rank has a missing gradient.

        Raises:
            RuntimeError: if a rank has exited, the timeout has expired, a gradient is sparse, a
                forward or backward ended with an error, or parameters have changed.
        """
        self._refuse_after_error()
        if not self._are_averaged():
            self._refuse_changes()
            if not self._sent_buffers:  # this rank had no batch; the others did so in forward
                self._synchronize_buffers()
            self._complete()
        self._averaged, self._open, self._sent_buffers = None, False, False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication in a `with` block.

        The accumulated gradients are averaged later: in the first backward after the `with` block,
        or at the latest in `finish_gradient_synchronization`.
        """
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients, so that their norm is at most `max_norm`. Return the norm before.

        All ranks must call it, after the gradients were averaged. It does what
        `torch.nn.utils.clip_grad_norm_` does on one process. The result is a tensor without
        dimensions, in float32 if parameters are sharded.
        """
        sharded, parameters = self._sharded_parameters(), list(self.parameters())
        if not sharded:
            return nn.utils.clip_grad_norm_(parameters, max_norm)
        kinds: tuple[list[Tensor], list[Tensor]] = [], []  # replicated, sharded
        for parameter in parameters:
            if parameter.grad is not None:
                kinds[parameter in sharded].append(parameter.grad)
        squares = [_norm(grads, parameters[0].device).square() for grads in kinds]
        dist.all_reduce(squares[1], group=self._group)
        total = (squares[0] + squares[1]).sqrt()
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        return total.to(torch.float32)

    # ---- what subclasses define ------------------------------------------------------------------

    def _run(self, inputs: Any, kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)

    def _sharded_parameters(self) -> set[nn.Parameter]:
        """Return the parameters whose gradients are on several ranks, a part or none on each."""
        return set()

    def _average(self) -> None:
        """Replace the gradients of `self._trained`, none of which is None, by their means."""
        raise NotImplementedError

    def _on_gradient(self, index: int, parameter: Tensor) -> None:
        """Handle a complete gradient, of parameter `index` in `hooked` of `_start`."""

    def _begin_backward(self) -> None:
        """Prepare for a backward pass."""

    def _complete(self) -> None:
        """Average all gradients that this step has left."""
        self._average_replicated()

    # ---- a step ----------------------------------------------------------------------------------

    @not_compiled
    def _begin_forward(self) -> None:
        self._refuse_after_error()
        self._refuse_changes()
        self._in_forward = True
        if torch.is_grad_enabled():
            self._averaged = None
        self._synchronize_buffers()

    @not_compiled
    def _end_forward(self, output: Any) -> None:
        self._in_forward = False
        if torch.is_grad_enabled():
            hook = weak_hook(self._on_output_gradient)
            for tensor in tensors_in(output):
                if not tensor.is_leaf:
                    tensor.register_hook(hook)

    def _synchronize_buffers(self) -> None:
        """Broadcast buffers, see `DataParallel`."""
        if not self._has_buffers:
            return
        is_training = any(module.training for module in self.module.modules())
        if self._synchronizing and (is_training or self._buffers_differ):
            broadcast_from_first(_persistent_buffers(self.module), self._group)
            self._buffers_differ = False
            self._sent_buffers |= is_training and torch.is_grad_enabled()
        self._buffers_differ |= is_training

    def _refuse_after_error(self) -> None:
        if self._in_forward or self._backward is not None:
            raise RuntimeError(
                "forward or backward ended with an error; make a new wrapper of a new module, "
                "which can load the state_dict() of this one"
            )

    def _on_output_gradient(self, _: Tensor) -> None:
        if self._backward != torch._C._current_graph_task_id():
            self._refuse_after_error()
        self._notice_backward()

    def _notice_backward(self) -> None:
        """Let autograd call `_end_backward`, at the first hook in a backward pass.

        That is the hook of an output, which runs in the outermost pass. A hook of a parameter may
        run in a pass that reentrant checkpointing nests in it.
        """
        if self._backward is None:
            self._backward = torch._C._current_graph_task_id()
            self._begin_backward()
            held = [self]  # on a GPU, autograd may keep the callback for longer than backward
            Variable._execution_engine.queue_callback(lambda: held.pop()._end_backward())

    def _end_backward(self) -> None:
        if not self._synchronizing:
            self._averaged = None
        elif self._open:
            self._complete()
            grads = ((p, p.grad) for p in self._wrapped)
            found = ((p, weakref.ref(g), g._version) for p, g in grads if g is not None)
            self._averaged = next(found, ())
            self._sent_buffers = False
        self._open, self._backward = False, None

    def _are_averaged(self) -> bool:
        """Return whether the gradients are as the last backward has averaged them.

        They are not if they were set to None or to zero since, for a step without a batch.
        """
        if not self._averaged:
            return self._averaged is not None
        parameter, grad, version = self._averaged
        return parameter.grad is grad() is not None and parameter.grad._version == version

    def _gradient(self, index: int, parameter: Tensor) -> None:
        self._notice_backward()
        if not self._open:  # to set an attribute of a module is slow
            self._open = True
        if parameter.grad is None:  # its function has none, or a hook of the user has removed it
            return
        if _shares_memory(parameter.grad):  # but averages are written in place
            parameter.grad = parameter.grad.clone()
        mark_own(parameter.grad)
        self._on_gradient(index, parameter)

    def _average_replicated(self) -> None:
        """Replace the gradients of `self._trained` by their means over the ranks.

        A parameter that no rank used keeps `grad` None, because with a gradient of zeros, momentum
        and weight decay would change it. A small all-reduce finds these. Only ranks with a missing
        gradient, which contribute zeros, read its result, which blocks the host.
        """
        if not self._trained:
            return
        missing = self._missing()
        used = self._all_used  # all ones; an all-reduce with MAX does not change them
        if missing:
            used = used.clone()
            used[missing] = 0
            for i in missing:
                self._trained[i].grad = torch.zeros_like(self._trained[i])
        self._average()
        dist.all_reduce(used, dist.ReduceOp.MAX, group=self._group, async_op=True).wait()
        if missing:
            anywhere = used.tolist()
            for i in missing:
                if not anywhere[i]:
                    self._trained[i].grad = None

    def _missing(self) -> list[int]:
        """Return the indices in `self._trained` of the parameters without a gradient."""
        return [i for i, parameter in enumerate(self._trained) if parameter.grad is None]

    # ---- parameters ------------------------------------------------------------------------------

    def _start(self, hooked: list[Any]) -> None:
        """Mark all parameters; autograd then calls `_on_gradient` with the index in `hooked`."""
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(weak_hook(self._gradient, index))
            for index, parameter in enumerate(hooked)
        ]
        for parameter in self.module.parameters():
            _WRAPPED[parameter] = type(self)
        # Views of the parameters and children of all modules, which show every change
        self._views: list[Any] = []
        for module in (self, *self.module.modules()):
            self._views += [module._parameters.values(), module._modules.values()]
        self._held = list(chain.from_iterable(self._views))  # what they show now
        self._wrapped = list(self.module.parameters())
        self._trained_flags = list(map(_TRAINED, self._wrapped))
        self._dtypes = list(map(_DTYPE, self._wrapped))

    def _refuse_changes(self) -> None:
        """Refuse changed parameters or modules. Takes less than 0.1 ms for 500 parameters."""
        if not (
            sum(map(len, self._views)) == len(self._held)
            and all(map(is_, chain.from_iterable(self._views), self._held))
            and list(map(_TRAINED, self._wrapped)) == self._trained_flags
            and list(map(_DTYPE, self._wrapped)) == self._dtypes
        ):
            raise RuntimeError(
                "parameters and modules must not be frozen, thawed, cast, replaced or added after "
                "wrapping; do so before, and make a new wrapper of a new module to change them"
            )

    def _replicate(self, trained: list[nn.Parameter]) -> None:
        """Average the gradients of these parameters, which are the same on all ranks."""
        self._trained = trained
        device = trained[0].device if trained else torch.device("cpu")
        self._all_used = torch.ones(len(trained), dtype=torch.uint8, device=device)

    # ---- state -----------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the wrapped module, which it and any wrapper can load."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state dict of the module, of any wrapper here, or of torch's DDP.

        All ranks must load the same one.
        """
        if not hasattr(self.module, "module") and all(k.startswith("module.") for k in state_dict):
            state_dict = {k.removeprefix("module."): value for k, value in state_dict.items()}
        return self.module.load_state_dict(state_dict, *args, **kwargs)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        # Called if the wrapper is a part of the module that loads.
        inside = f"{prefix}module."
        for key in [key for key in state_dict if key.startswith(prefix)]:
            if not key.startswith(inside) or hasattr(self.module, "module"):
                state_dict[inside + key.removeprefix(prefix)] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled; save its state_dict(), or copy "
            "its `module` if the parameters are not sharded"
        )


def in_backward() -> bool:
    """Return whether this thread runs a backward pass. A forward in it is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def weak_hook(method: Callable[..., Any], *args: Any) -> Callable[[Tensor], None]:
    """Return a hook of a tensor that calls a method while its object exists.

    Python's garbage collector does not see the hooks of a tensor, which would keep the object alive
    forever if it has the tensor.
    """
    reference = weakref.WeakMethod(method)

    def hook(tensor: Tensor) -> None:
        alive = reference()
        if alive is not None:
            alive(*args, tensor)

    return hook


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in a value, also in nested containers and dataclasses."""
    if isinstance(value, Tensor):  # quick, and nearly always so
        return [value]
    found: list[Tensor] = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf):
            found += tensors_in([getattr(leaf, f.name, None) for f in dataclasses.fields(leaf)])
    return found


def gradient_of(parameter: Tensor) -> Tensor:
    """Return the gradient, in a form in which other ranks can read its memory.

    Raises:
        RuntimeError: if it is sparse.
    """
    gradient = parameter.grad
    assert gradient is not None
    if gradient.layout is not torch.strided:
        raise RuntimeError(
            f"gradients must be dense, got {gradient.layout} of shape {tuple(gradient.shape)}; "
            "build the embedding with sparse=False"
        )
    if gradient.is_neg() or gradient.is_conj():  # its memory has other values
        gradient = parameter.grad = gradient.resolve_conj().resolve_neg()
    return gradient


def mark_own(gradient: Tensor) -> Tensor:
    """Note that a gradient is of a wrapper, and shares no memory with that of another parameter."""
    setattr(gradient, _OWN, True)
    return gradient


def _shares_memory(gradient: Tensor) -> bool:
    """Return True if a gradient that has just arrived shares its memory with another tensor.

    If parameters are added, as a + b, autograd may give both the same memory. The storage of a new
    gradient is otherwise used twice: by the gradient and by what autograd has passed on.
    """
    if gradient.layout is not torch.strided or hasattr(gradient, _OWN):
        return False
    return torch._C._storage_Use_Count(gradient.untyped_storage()._cdata) > 2


def _norm(gradients: list[Tensor], device: torch.device) -> Tensor:
    """Return the norm of all gradients together, in float64, 0 if there are none."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)).double())


def refusal_of(named: Iterable[tuple[str, Tensor]], sharded_only: bool = False) -> str | None:
    """Return why parameters cannot be used, if they belong to a wrapper or are DTensors.

    With sharded_only, only shards of an FSDP wrapper of this project are refused.
    """
    for name, parameter in named:
        wrapper = _WRAPPED.get(parameter)
        if wrapper is not None and (wrapper.sharded or not sharded_only):
            verb = "sharded" if wrapper.sharded else "averaged"
            advice = "use the optimizer alone" if sharded_only else "wrap another module"
            return f"{name} is already {verb} by a {wrapper.__name__}; {advice}"
        if type(parameter).__name__ == "DTensor" and not sharded_only:
            return f"{name} is already a DTensor, of FSDP2 or tensor parallelism"
    return None


def _refusal(module: nn.Module) -> str | None:
    for name, inner in module.named_modules():
        if isinstance(inner, (DataParallelWrapper, DistributedDataParallel)):
            where = f"its part {name!r}" if name else "it"
            return f"the module cannot be wrapped, because {where} is a {type(inner).__name__}"
        if isinstance(inner, (nn.Embedding, nn.EmbeddingBag)) and inner.max_norm is not None:
            return (
                f"{name or 'the module'} has max_norm, which changes the weights of each rank "
                "differently in forward; build it without"
            )
    return refusal_of(module.named_parameters())


def _persistent_buffers(module: nn.Module) -> Iterator[Tensor]:
    for inner in module.modules():
        for name, buffer in inner._buffers.items():
            persistent = name not in inner._non_persistent_buffers_set
            if buffer is not None and buffer.numel() and persistent:
                yield buffer
