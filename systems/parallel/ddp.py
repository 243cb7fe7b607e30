"""Data parallel: each rank has all of the model and a part of the batch; gradients are averaged.

    model = BucketedDDP(TransformerLM(...), bucket_size_mb=25)
    optimizer = AdamW(model.parameters())
    cross_entropy(model(tokens), targets).backward()
    model.finish_gradient_synchronization()
    optimizer.step()

Four ways to average, from the simplest to those that overlap it with backward (Li et al. 2020,
"PyTorch Distributed: Experiences on Accelerating Data Parallel Training", section 3.2):

    NaiveDDP        one all-reduce per parameter, after backward
    FlatDDP         one all-reduce of all gradients, concatenated, after backward
    OverlappedDDP   one all-reduce per parameter, as soon as its gradient is ready
    BucketedDDP     one all-reduce per bucket, as soon as its gradients are ready

The last two never copy a gradient: a bucket is a list of tensors, reduced where autograd put them.
So between steps no more memory is in use than on one GPU; use `zero_grad(set_to_none=True)`.

All ranks must issue the same collectives in the same order, whatever each of them does with its
data. So every trained parameter is reduced in every step, in a fixed order: a gradient that is
ready early waits for its turn, and one that does not come at all is sent as zeros when the step is
finished. A last, tiny all-reduce finds which parameters any rank used, because a parameter that
none used must keep `grad` None, or momentum and weight decay would move it. Only a rank that lacks
a gradient reads the result; the others do not wait for it.

NCCL's kernels take multiprocessors from backward: NCCL_MAX_CTAS limits how many, and
`ProcessGroupNCCL.Options(is_high_priority_stream=True)` lets them start first. Both are settings of
the process group, which the caller makes.
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
    """Average the gradients of some parameters, by `average`, also where some have none.

    Args:
        named: parameters by name, the same on all ranks.
        average: called when all in `trained` have a gradient; replaces them by the averages.
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
        """Average; parameters that no rank used keep `grad` None.

        Raises:
            RuntimeError: a parameter is trained that was frozen; a gradient is sparse.
        """
        thawed = [name for name, p in self._frozen if p.requires_grad]
        if thawed:
            raise RuntimeError(
                f"frozen when the model was wrapped, and now trained: {', '.join(thawed)}; "
                "set requires_grad before you wrap"
            )
        if not self.trained:
            return
        missing = [i for i, p in enumerate(self.trained) if p.grad is None]
        used = self._all_used  # all ones: an all-reduce by MAX leaves it as it is
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
    """Base class of the four: copies rank 0's module to all ranks and averages gradients.

    Args:
        module: the same on all ranks but for its values, on the process group's device. Freeze
            parameters that are not to be trained before.
        process_group: all ranks by default.

    Raises:
        ValueError: parameters or buffers differ across ranks in name, order, shape, stride, dtype
            or requires_grad; the message, on all ranks, says which rank differs and where.
        RuntimeError: there is no process group.
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
        """Run the module and return what it returns."""
        return self.module(*inputs, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Finish averaging; call it between backward and the optimizer's step. Then every `grad` is
        the mean over all ranks.

        A rank that did not use a parameter counts as zero in its mean; a parameter that no rank
        used keeps `grad` None. On a GPU the current stream waits and the host does not, unless this
        rank lacks a gradient.

        Raises:
            RuntimeError: a rank is gone or the timeout is over; a parameter was thawed.
        """
        self._gradients.finish()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients on this rank only; the first backward after the block, or
        `finish_gradient_synchronization`, averages the sum."""
        before, self._synchronizing = self._synchronizing, False
        try:
            yield
        finally:
            self._synchronizing = before

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's own, which the module without a wrapper can load."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the module's own. All ranks must load the same."""
        return self.module.load_state_dict(*args, **kwargs)

    def _average(self) -> None:
        raise NotImplementedError


class NaiveDDP(DataParallel):
    """One all-reduce per parameter, one after the other, after backward."""

    def _average(self) -> None:
        for parameter in self._gradients.trained:
            start_average([_grad(parameter)], self._group).wait()


class FlatDDP(DataParallel):
    """One all-reduce of all gradients of a dtype, after backward. Gradients are then views of one
    tensor."""

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None):
        super().__init__(module, process_group)
        self._buckets = fill_buckets(self._gradients.trained, float("inf"))

    def _average(self) -> None:
        for bucket in self._buckets:
            flat = torch.cat([_grad(parameter).reshape(-1) for parameter in bucket])
            for parameter in bucket:
                parameter.grad = None  # its memory is free for what comes next
            start_average([flat], self._group).wait()
            pieces = flat.split([parameter.numel() for parameter in bucket])
            for parameter, piece in zip(bucket, pieces, strict=True):
                parameter.grad = piece.view(parameter.shape)


class _Bucket:
    """Parameters whose gradients are reduced together, and how many of those are not ready."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        self.awaited = len(parameters)


class _HookedDDP(DataParallel):
    """Reduce during backward: buckets are sent in order, each when its gradients are ready."""

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
        self._next = 0  # bucket to send
        self._running: list[Average] = []
        for bucket in self._buckets:
            bucket.awaited = len(bucket.parameters)

    def _on_gradient(self, bucket: _Bucket, parameter: Tensor) -> None:
        """Send complete buckets. Runs for each parameter in each backward: must be cheap."""
        if not self._synchronizing:
            return
        if parameter in self._ready:
            raise RuntimeError(
                f"{self._name(parameter)} has a second gradient before "
                "finish_gradient_synchronization(), while its first may be on its way: run all "
                "backward passes of a step but the last one under no_sync()"
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
    """One all-reduce per parameter during backward, in reverse parameter order."""

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None):
        super().__init__(module, 0, process_group)


class BucketedDDP(_HookedDDP):
    """One all-reduce per bucket during backward.

    Args:
        bucket_size_mb: capacity of a bucket, in 10^6 bytes; filled in reverse parameter order. A
            larger parameter has a bucket to itself.

    Raises:
        ValueError: bucket_size_mb is not positive.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_size_mb: float,
        process_group: dist.ProcessGroup | None = None,
    ):
        if not bucket_size_mb > 0:
            raise ValueError(f"bucket_size_mb: given {bucket_size_mb}, expected more than 0")
        super().__init__(module, bucket_size_mb * MB, process_group)


def _grad(parameter: nn.Parameter) -> Tensor:
    grad = parameter.grad
    assert grad is not None
    if grad.layout is not torch.strided:
        raise RuntimeError(
            f"a gradient of shape {tuple(grad.shape)} is {grad.layout}; only dense gradients can "
            "be averaged: build the embedding with sparse=False"
        )
    return grad
