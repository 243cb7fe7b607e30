"""Distributed data parallel (DDP): every rank has the whole model and a part of the batch.

    model = BucketedDDP(TransformerLM(...), bucket_size_mb=25)
    optimizer = AdamW(model.parameters())
    cross_entropy(model(tokens), targets).backward()
    model.finish_gradient_synchronization()
    optimizer.step()

Gradients are averaged over the ranks, by one of these wrappers or by `PeerDDP` (Li et al. 2020,
"PyTorch Distributed: Experiences on Accelerating Data Parallel Training", section 3.2):

    NaiveDDP        one all-reduce per parameter, after backward
    FlatDDP         one all-reduce of all gradients, concatenated, after backward
    OverlappedDDP   one all-reduce per parameter, during backward
    BucketedDDP     one all-reduce per group of parameters (bucket), during backward

All of these but FlatDDP reduce gradients in place; only those that are not contiguous are copied.

All ranks must issue the same collectives in the same order, even if their data makes them use
different parameters. So every trainable parameter is reduced in every step, in a fixed order. A
gradient waits for those before it. A rank without a gradient sends zeros at the end of backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from systems.parallel.buckets import (
    MB,
    dense_like,
    fill_buckets,
    in_memory_order,
    shaped_as,
)
from systems.parallel.collectives import ReducedBuckets, start_average
from systems.parallel.wrapper import DataParallelWrapper, gradient_of, mark_own


class Exchange(Protocol):
    """Averages buckets of gradients, in a fixed order."""

    def start(self, index: int, gradients: list[Tensor]) -> Sequence[Tensor | None]:
        """Start to average the gradients of the next bucket, which has this index.

        Returns what replaces the gradients now. It has the means after `finish`. None for a
        gradient that only another rank keeps.
        """

    def finish(self) -> None:
        """Wait for the means of all buckets that were started. On a GPU, the stream waits."""


class DataParallel(DataParallelWrapper):
    """Base class of the DDP wrappers.

    The constructor overwrites the parameters and buffers of all ranks with those of rank 0.
    Persistent buffers, such as the statistics of BatchNorm, get the values of rank 0 before each
    forward in training mode, and before the first in evaluation mode after it, except in `no_sync`.

    Args:
        module: on the device of the process group, the same on all ranks except for the values of
            parameters and buffers. Freeze and cast parameters before.

    Raises:
        ValueError: on all ranks, if parameters or buffers differ across ranks in name, order,
            shape, stride, dtype or requires_grad; the message names the rank and the difference.
            Also if the module is or contains a wrapper, a parameter was wrapped before, or an
            embedding has `max_norm`.
        RuntimeError: if there is no process group.
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None):
        super().__init__(module, process_group)
        self._replicate([p for p in module.parameters() if p.requires_grad])
        self._start(self._trained)


class NaiveDDP(DataParallel):
    """DDP wrapper that all-reduces the gradients one after the other, after backward."""

    def _average(self) -> None:
        for parameter in self._trained:
            start_average([gradient_of(parameter)], self._group).wait()


class FlatDDP(DataParallel):
    """DDP wrapper that all-reduces all gradients of a dtype at once, after backward.

    Afterwards, they are views of one flat tensor per dtype.
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None):
        super().__init__(module, process_group)
        self._buckets = fill_buckets(self._trained, float("inf"))

    def _average(self) -> None:
        for bucket in self._buckets:
            dense = [dense_like(gradient_of(parameter), parameter) for parameter in bucket]
            flat = torch.cat(list(map(in_memory_order, dense)))
            del dense
            for parameter in bucket:
                parameter.grad = None  # frees memory before the all-reduce
            start_average([flat], self._group).wait()
            pieces = flat.split([parameter.numel() for parameter in bucket])
            for parameter, piece in zip(bucket, pieces, strict=True):
                parameter.grad = mark_own(shaped_as(piece, parameter))


class BucketedDDP(DataParallel):
    """DDP wrapper with one all-reduce per bucket, during backward.

    A bucket has at most bucket_size_mb, in 10^6 bytes, or one larger parameter. For the order, see
    `fill_buckets`. The average of a bucket starts when all of its gradients are ready and the
    averages of all previous buckets have been started.

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
        super().__init__(module, process_group)
        self._buckets = fill_buckets(self._trained, bucket_size_mb * MB)
        buckets = {p: index for index, bucket in enumerate(self._buckets) for p in bucket}
        self._bucket_of = [buckets[parameter] for parameter in self._trained]
        self._exchange = self._make_exchange()
        self._begin()

    def _make_exchange(self) -> Exchange:
        return ReducedBuckets(self._group_of)

    def _begin(self) -> None:
        self._ready = [False] * len(self._trained)
        self._awaited = [len(bucket) for bucket in self._buckets]  # gradients that are not ready
        self._next = 0  # index of the next bucket to reduce

    def _on_gradient(self, index: int, parameter: Tensor) -> None:
        """Record that a gradient is ready, and start the averages that are now possible.

        Autograd calls this hook for every parameter, so it must be cheap. Raises RuntimeError if a
        parameter gets a second gradient in the same backward, or has a hook of the user that would
        run later, when the gradient may have been sent.
        """
        if not self._synchronizing:
            return
        hooks: Any = parameter._post_accumulate_grad_hooks
        if next(reversed(hooks)) != self._hooks[index].id:
            raise RuntimeError(
                "register_post_accumulate_grad_hook must be called before wrapping, because the "
                "gradient may be on its way to other ranks when a later hook runs"
            )
        if self._ready[index]:
            name = next(name for name, p in self.module.named_parameters() if p is parameter)
            raise RuntimeError(
                f"{name} got a second gradient in one backward, as with reentrant checkpoints that "
                "share a weight; checkpoint with use_reentrant=False, or run this backward under "
                "no_sync() and then finish_gradient_synchronization()"
            )
        self._ready[index] = True
        self._awaited[self._bucket_of[index]] -= 1
        while self._next < len(self._buckets) and self._awaited[self._next] == 0:
            self._send_next()

    def _send_next(self) -> None:
        bucket = self._buckets[self._next]
        gradients = self._exchange.start(self._next, [gradient_of(p) for p in bucket])
        for parameter, gradient in zip(bucket, gradients, strict=True):
            parameter.grad = None if gradient is None else mark_own(gradient)
        self._next += 1

    def _average(self) -> None:
        while self._next < len(self._buckets):
            self._send_next()
        self._exchange.finish()
        self._begin()


class OverlappedDDP(BucketedDDP):
    """DDP wrapper with one all-reduce per parameter, during backward, in reverse order."""

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None):
        super().__init__(module, 1 / MB, process_group)
