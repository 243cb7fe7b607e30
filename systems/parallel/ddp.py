"""Distributed data parallel (DDP): every rank has the whole model and a part of the batch.

    model = BucketedDDP(TransformerLM(...), bucket_size_mb=25)
    optimizer = AdamW(model.parameters())
    cross_entropy(model(tokens), targets).backward()
    model.finish_gradient_synchronization()
    optimizer.step()

Gradients are averaged over the ranks, by one of four wrappers (Li et al. 2020, "PyTorch
Distributed: Experiences on Accelerating Data Parallel Training", section 3.2):

    NaiveDDP        one all-reduce per parameter, after backward
    FlatDDP         one all-reduce of all gradients, concatenated, after backward
    OverlappedDDP   one all-reduce per parameter, during backward
    BucketedDDP     one all-reduce per group of parameters (bucket), during backward

OverlappedDDP and BucketedDDP overlap communication with backward. A bucket is a list of gradient
tensors, which are reduced in place; only gradients that are not contiguous are copied. So between
steps, training needs no more memory than on one GPU. Use `zero_grad(set_to_none=True)`.

All ranks must issue the same collectives in the same order, even if their data makes them use
different parameters. So every trainable parameter is reduced in every step, in a fixed order. If a
gradient is ready before the previous gradients in this order, its all-reduce starts after theirs.
If a rank has no gradient for a parameter, `finish_gradient_synchronization` sends zeros.

A small all-reduce at the end finds the parameters that no rank used. These parameters keep `grad`
None, because with a gradient of zeros, momentum and weight decay would change them. To read the
result of this all-reduce on a GPU, the host must block. Only ranks with a missing gradient do so.

NCCL kernels use SMs that backward could use. The environment variable NCCL_MAX_CTAS limits the
number of these SMs. `ProcessGroupNCCL.Options(is_high_priority_stream=True)` makes NCCL kernels
start before waiting kernels of backward. The wrappers do not set these two options. The caller can
set them for the process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from systems.parallel.buckets import MB, fill_buckets
from systems.parallel.collectives import (
    Average,
    broadcast_from_first,
    group_or_world,
    start_average,
)
from systems.parallel.rank_consistency import check_agreement


class GradientAverage:
    """Average gradients over the ranks, even if a rank has no gradient for some parameters.

    A rank without a gradient for a parameter contributes zeros to the mean. `average` replaces the
    gradients of all trainable parameters by their means over the ranks. Before it is called,
    missing gradients are replaced by zeros. `named` is the same on all ranks.
    """

    def __init__(
        self,
        named: list[tuple[str, nn.Parameter]],
        group: dist.ProcessGroup,
        average: Callable[[], None],
    ):
        self.trained = [p for _, p in named if p.requires_grad]
        self._frozen = [(name, p) for name, p in named if not p.requires_grad]
        self._group, self._average = group, average
        self._all_used = torch.empty(0)
        if self.trained:
            device = self.trained[0].device
            self._all_used = torch.ones(len(self.trained), dtype=torch.uint8, device=device)

    def finish(self) -> None:
        """Replace the gradients of the trainable parameters by their means over the ranks.

        A parameter that no rank used keeps `grad` None. All ranks must call this method.

        Raises:
            RuntimeError: if a parameter was frozen when the model was wrapped and is now trainable,
                or if a gradient is sparse.
        """
        thawed = [name for name, p in self._frozen if p.requires_grad]
        if thawed:
            raise RuntimeError(
                "requires_grad must not change after the model was wrapped, got trainable "
                f"parameters that were frozen: {', '.join(thawed)}; set it before wrapping"
            )
        if not self.trained:
            return
        missing = [i for i, p in enumerate(self.trained) if p.grad is None]
        used = self._all_used  # all ones; an all-reduce with MAX does not change them
        if missing:
            used = used.clone()
            used[missing] = 0
            for i in missing:
                self.trained[i].grad = torch.zeros_like(self.trained[i])
        self._average()
        work = dist.all_reduce(used, dist.ReduceOp.MAX, group=self._group, async_op=True)
        work.wait()
        if missing:
            anywhere = used.tolist()
            for i in missing:
                if not anywhere[i]:
                    self.trained[i].grad = None


class DataParallel(nn.Module):
    """Base class of the DDP wrappers.

    The constructor overwrites the parameters and buffers of all ranks with those of rank 0.
    Subclasses define when and how gradients are averaged over the ranks.

    Args:
        module: on the device of the process group, the same on all ranks except for the values of
            parameters and buffers. Freeze parameters before wrapping.

    Raises:
        ValueError: on all ranks, if parameters or buffers differ across ranks in name, order,
            shape, stride, dtype or requires_grad; the message names the rank and the difference.
        RuntimeError: if there is no process group.
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None):
        super().__init__()
        self.module = module
        self._group = group_or_world(process_group)
        named = list(module.named_parameters())
        check_agreement([*named, *module.named_buffers()], self._group)
        broadcast_from_first([*module.parameters(), *module.buffers()], self._group)
        self._gradients = GradientAverage(named, self._group, self._average)
        self._synchronizing = True

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module and return its output."""
        return self.module(*inputs, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Finish averaging, so that every `grad` is the mean over all ranks.

        Call it after backward and before the step of the optimizer. All ranks must call it. A rank
        that did not use a parameter contributes zeros to the mean. A parameter that no rank used
        keeps `grad` None. On a GPU, the current stream waits for the communication. The host blocks
        only if this rank has a missing gradient.

        Raises:
            RuntimeError: if a rank has exited, the timeout has expired, a gradient is sparse, or a
                parameter was frozen when the model was wrapped and is now trainable.
        """
        self._gradients.finish()

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

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of the wrapped module.

        The names in it are those of the module without the wrapper. The module can load the state
        dict without the wrapper.
        """
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state dict into the wrapped module. All ranks must load the same state dict."""
        return self.module.load_state_dict(*args, **kwargs)

    def _average(self) -> None:
        raise NotImplementedError


class NaiveDDP(DataParallel):
    """DDP wrapper that all-reduces the gradients one after the other, after backward."""

    def _average(self) -> None:
        for parameter in self._gradients.trained:
            start_average([_grad(parameter)], self._group).wait()


class FlatDDP(DataParallel):
    """DDP wrapper that all-reduces all gradients of a dtype at once, after backward.

    The gradients are concatenated into one flat tensor per dtype. After the all-reduce, they are
    views of the flat tensors.
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None):
        super().__init__(module, process_group)
        self._buckets = fill_buckets(self._gradients.trained, float("inf"))

    def _average(self) -> None:
        for bucket in self._buckets:
            flat = torch.cat([_grad(parameter).reshape(-1) for parameter in bucket])
            for parameter in bucket:
                parameter.grad = None  # frees memory before the all-reduce
            start_average([flat], self._group).wait()
            pieces = flat.split([parameter.numel() for parameter in bucket])
            for parameter, piece in zip(bucket, pieces, strict=True):
                parameter.grad = piece.view(parameter.shape)


class _Bucket:
    """Parameters whose gradients are reduced in one all-reduce."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        self.awaited = len(parameters)  # number of gradients that are not ready


class _HookedDDP(DataParallel):
    """Base class of the DDP wrappers that all-reduce gradients during backward.

    Parameters are divided into buckets. The gradients of a bucket are reduced in one all-reduce.
    Buckets have a fixed order. The all-reduce of a bucket starts when all of its gradients are
    ready and the all-reduces of all previous buckets have been started. `capacity` is the maximum
    size of a bucket, in bytes. A larger parameter gets a separate bucket.
    """

    def __init__(
        self,
        module: nn.Module,
        capacity: float,
        process_group: dist.ProcessGroup | None,
    ):
        super().__init__(module, process_group)
        trained = self._gradients.trained
        self._buckets = [_Bucket(parameters) for parameters in fill_buckets(trained, capacity)]
        for bucket in self._buckets:
            for parameter in bucket.parameters:
                parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, bucket))
        self._begin()

    def _begin(self) -> None:
        self._ready: set[Tensor] = set()
        self._next = 0  # index of the next bucket to reduce
        self._running: list[Average] = []
        for bucket in self._buckets:
            bucket.awaited = len(bucket.parameters)

    def _on_gradient(self, bucket: _Bucket, parameter: Tensor) -> None:
        """Record that a gradient is ready, and start the all-reduces that are now possible.

        The all-reduce of a bucket starts when all gradients of the bucket are ready and the
        all-reduces of all previous buckets have been started. Autograd calls this hook for every
        parameter, so it must be cheap.

        Raises:
            RuntimeError: if a parameter gets a second gradient before the next
                `finish_gradient_synchronization`.
        """
        if not self._synchronizing:
            return
        if parameter in self._ready:
            raise RuntimeError(
                f"{self._name(parameter)} got a second gradient before "
                "finish_gradient_synchronization() was called; run all backward passes of a step "
                "except the last one under no_sync()"
            )
        self._ready.add(parameter)
        bucket.awaited -= 1
        if bucket.awaited == 0:
            while self._next < len(self._buckets) and self._buckets[self._next].awaited == 0:
                self._send_next()

    def _send_next(self) -> None:
        gradients = [_grad(parameter) for parameter in self._buckets[self._next].parameters]
        self._running.append(start_average(gradients, self._group))
        self._next += 1

    def _average(self) -> None:
        while self._next < len(self._buckets):
            self._send_next()
        for average in self._running:
            average.wait()
        self._begin()

    def _name(self, parameter: Tensor) -> str:
        return next(name for name, p in self.module.named_parameters() if p is parameter)


class OverlappedDDP(_HookedDDP):
    """DDP wrapper with one all-reduce per parameter, during backward.

    The all-reduces run in reverse parameter order, because backward computes the gradients of the
    last layer first.
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None):
        super().__init__(module, 0, process_group)


class BucketedDDP(_HookedDDP):
    """DDP wrapper with one all-reduce per bucket, during backward.

    A bucket is a group of parameters whose gradients are reduced together. Buckets are filled in
    reverse parameter order, because backward computes the gradients of the last layer first.
    bucket_size_mb is in 10^6 bytes. A larger parameter gets a separate bucket.

    Raises:
        ValueError: if bucket_size_mb is not positive.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float,
        process_group: dist.ProcessGroup | None = None,
    ):
        if not bucket_size_mb > 0:
            raise ValueError(f"bucket_size_mb must be more than 0, got {bucket_size_mb}")
        super().__init__(module, bucket_size_mb * MB, process_group)


def _grad(parameter: nn.Parameter) -> Tensor:
    grad = parameter.grad
    assert grad is not None
    if grad.layout is not torch.strided:
        raise RuntimeError(
            f"gradients must be dense, got {grad.layout} of shape {tuple(grad.shape)}; build the "
            "embedding with sparse=False"
        )
    return grad
