"""Distributed data parallel (DDP) on one host, whose ranks copy gradients to each other."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from systems.parallel.buckets import (
    ALIGNMENT,
    dense_like,
    in_memory_order,
    packed_bytes,
    places,
    shaped_as,
)
from systems.parallel.ddp import BucketedDDP, Exchange
from systems.parallel.peer_means import PeerMeans
from systems.parallel.peer_memory import can_have_peer_memory, make_peer_memory
from systems.parallel.wrapper import mark_own

IN_FLIGHT = 4  # largest number of buckets that are averaged at the same time
_SHARDED: Any = WeakIdKeyDictionary()  # parameter -> weak reference to the PeerDDP that shards it


def gradient_is_sharded(parameter: Tensor) -> bool:
    """Return whether only one rank gets the gradient, see `PeerDDP.shard_gradients`."""
    wrapper = _SHARDED[parameter]() if parameter in _SHARDED else None
    return wrapper is not None and parameter in wrapper._sharded_parameters()


class PeerDDP(BucketedDDP):
    """DDP wrapper whose ranks copy gradients into each other's memory, during backward.

    On GPUs of one host that can access each other's memory, copy engines move the gradients, and
    not multiprocessors, see `peer_means`. Gradients become views of a buffer for all of them, which
    the next backward overwrites: clone one to keep it. On a CPU, the ranks share memory.

    Elsewhere, for example on several hosts, the wrapper works as `BucketedDDP`, and warns.

    A `ShardedOptimizer` with shard_gradients lets each rank keep only the gradients of the
    parameters that it updates, and there is no such buffer. Then clip gradients by the method
    `clip_grad_norm_`, and scale the loss with torch's `ShardedGradScaler`, because a rank does not
    see the other gradients. A rank that updates none has a gradient of zeros after backward. A step
    averages once: accumulate under `no_sync`, and set gradients to None before the next step.
    """

    _owners: dict[Tensor, int] | None = None  # with sharded gradients
    # What was averaged last, which only this rank has: parameters and references to gradients
    _means: Sequence[tuple[nn.Parameter, weakref.ref[Tensor]]] = ()
    _used = False  # the optimizer has used them

    def shard_gradients(self, owners: Mapping[Tensor, int]) -> None:
        """Keep only the gradients of the parameters that this rank owns from now on.

        All ranks must call this function, with the rank of each parameter. See `ShardedOptimizer`.

        Raises:
            ValueError: if a trainable parameter of the module is missing, or has a gradient, which
                other ranks may have as well.
        """
        left = [n for n, p in self.named_parameters() if p.requires_grad and p not in owners]
        if left:
            raise ValueError(
                f"with shard_gradients, the optimizer must have all trainable parameters of the "
                f"module, but {left[0]} is missing"
            )
        if any(parameter.grad is not None for parameter in self._trained):
            raise ValueError(
                "with shard_gradients, make the optimizer before backward, or after "
                "zero_grad(set_to_none=True)"
            )
        self._owners = dict(owners)
        _SHARDED.update(dict.fromkeys(owners, weakref.ref(self)))
        del self._exchange  # frees the buffer
        self._exchange = self._make_exchange()

    def _make_exchange(self) -> Exchange:
        devices = {parameter.device for parameter in self._trained}
        if not devices or not can_have_peer_memory(self._group, devices):
            return super()._make_exchange()
        return PeerBuckets(self._buckets, self._group, self._owners)

    def _gradient(self, index: int, parameter: Any) -> None:
        if self._has_means(parameter):
            raise RuntimeError(
                "with shard_gradients, a backward must not add to averaged gradients; call "
                "zero_grad(set_to_none=True) before it, or run the backwards before under no_sync()"
            )
        super()._gradient(index, parameter)

    def _begin_backward(self) -> None:
        self._has_means()  # notes which were set to None

    def _has_means(self, arrived: nn.Parameter | None = None) -> bool:
        """Return whether gradients are still means that only this rank has.

        The gradient of the parameter `arrived` may be a new one. Others may be changed means, as by
        clipping, until the optimizer has used them.
        """
        self._means = [
            (p, mean)
            for p, mean in self._means
            if p.grad is not None and (p.grad is mean() or not (self._used or p is arrived))
        ]
        return bool(self._means)

    def note_step(self) -> None:
        """Note that the optimizer has used sharded gradients, so others are of a new step."""
        self._used = True

    def _average_replicated(self) -> None:
        arrived = [p for p, ready in zip(self._trained, self._ready, strict=True) if ready]
        # If they are averaged again, means take no part, as the other ranks have none.
        means = [(p, p.grad) for p, _ in self._means] if self._has_means() else []
        for parameter, _ in means:
            parameter.grad = None
        super()._average_replicated()
        if not self._sharded_parameters():
            return
        for parameter, mean in means:
            parameter.grad = mean
        if arrived and all(parameter.grad is None for parameter in self._trained):
            # This rank owns nothing that was used. A gradient of zeros shows, as the means of other
            # ranks do, whether this step is over: then the user removes it.
            smallest = min(arrived, key=Tensor.numel)
            smallest.grad = mark_own(torch.zeros_like(smallest))
        grads = ((parameter, parameter.grad) for parameter in self._trained)
        self._means = [(p, weakref.ref(grad)) for p, grad in grads if grad is not None]
        self._used = False

    def _missing(self) -> list[int]:
        missing = super()._missing()
        if self._owners is None:
            return missing
        return [i for i in missing if self._bucket_of[i] >= self._next]  # not sent yet

    def _sharded_parameters(self) -> set[nn.Parameter]:
        if self._owners is None or not isinstance(self._exchange, PeerBuckets):
            return set()
        return {parameter for parameter in self.parameters() if parameter in self._owners}


class PeerBuckets:
    """Averages buckets of gradients by `PeerMeans`. An `Exchange`.

    The gradients of a bucket have one dtype and device. All ranks must have the same ones.

    Every rank averages an equal part of each bucket. It writes the means into the buffers of all
    ranks when the others have sent their gradients, so they have used the means of the step before.

    Args:
        owners: rank of each parameter. Then the owner averages the whole gradient, in place, and
            the gradients of the others become None.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[Tensor]],
        group: dist.ProcessGroup,
        owners: Mapping[Tensor, int] | None = None,
    ):
        self._buckets, self._owners, self._ranks = buckets, owners, group.size()
        self._strides = [[parameter.stride() for parameter in bucket] for bucket in buckets]
        shares = [self._shares(bucket, list(map(in_memory_order, bucket))) for bucket in buckets]
        width = max(ALIGNMENT, *map(packed_bytes, itertools.chain(*shares)))
        start = PeerMeans.nbytes(width, IN_FLIGHT, self._ranks)
        nbytes = start + (sum(map(packed_bytes, buckets)) if owners is None else 0)
        memory = make_peer_memory(group, buckets[0][0].device, nbytes)
        self._peers, self._rank = memory.peers, memory.rank
        self._averages = PeerMeans(memory, width, IN_FLIGHT)
        # By bucket: the averaged gradients, and where this rank writes its part of them, by rank
        self._gradients: list[list[Tensor]] = []
        self._targets: list[list[list[Tensor]]] = []
        for bucket in buckets if owners is None else ():
            flat = [places(buffer[start:], bucket) for buffer in memory.buffers]
            self._targets.append([self._shares(bucket, of_rank)[self._rank] for of_rank in flat])
            self._gradients.append(
                [
                    shaped_as(place, parameter)
                    for place, parameter in zip(flat[self._rank], bucket, strict=True)
                ]
            )
            start += packed_bytes(bucket)

    def _shares(self, bucket: Sequence[Tensor], flat: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return what each rank averages of flat tensors, one for each parameter of a bucket."""
        if self._owners is None:
            return _equal_parts(flat, self._ranks)
        shares: list[list[Tensor]] = [[] for _ in range(self._ranks)]
        for parameter, tensor in zip(bucket, flat, strict=True):
            shares[self._owners[parameter]].append(tensor)
        return shares

    @torch.no_grad()
    def start(self, index: int, gradients: list[Tensor]) -> list[Tensor | None]:
        bucket = self._buckets[index]
        if [parameter.stride() for parameter in bucket] != self._strides[index]:
            raise RuntimeError(
                "the memory format of parameters must not change after PeerDDP was made; call "
                "model.to(memory_format=...) before"
            )
        dense = [
            dense_like(gradient.to(parameter.dtype), parameter)
            for gradient, parameter in zip(gradients, bucket, strict=True)
        ]
        shares = self._shares(bucket, list(map(in_memory_order, dense)))
        if self._owners is not None:
            self._averages.start(shares, shares[self._rank])
            return [
                gradient if self._owners[parameter] == self._rank else None
                for gradient, parameter in zip(dense, bucket, strict=True)
            ]
        targets = self._targets[index]
        self._averages.start(shares, targets[self._rank], partial(self._spread, targets))
        # Other objects, whose `.data` the user may replace, with version counters of their own
        return [gradient.data for gradient in self._gradients[index]]

    def finish(self) -> None:
        self._averages.finish()

    @torch.no_grad()
    def _spread(self, targets: Sequence[Sequence[Tensor]]) -> None:
        for peer in self._peers:
            for target, mean in zip(targets[peer], targets[self._rank], strict=True):
                target.copy_(mean)


def _equal_parts(tensors: Sequence[Tensor], count: int) -> list[list[Tensor]]:
    """Split one-dimensional tensors of one dtype, side by side, into parts of about equal size.

    Each piece of a part is a copy to every other rank, so they are few.
    """
    total = sum(tensor.numel() for tensor in tensors)
    aligned = max(1, ALIGNMENT // tensors[0].itemsize)
    ends = [total * part // count // aligned * aligned for part in range(count)] + [total]
    parts: list[list[Tensor]] = [[] for _ in range(count)]
    start = 0
    for tensor in tensors:
        for part, (low, high) in zip(parts, itertools.pairwise(ends), strict=True):
            piece = tensor[max(low - start, 0) : max(high - start, 0)]
            if piece.numel():
                part.append(piece)
        start += tensor.numel()
    return parts
