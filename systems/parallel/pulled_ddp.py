"""Distributed data parallel (DDP) on one host, whose ranks read each other's gradients."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from systems.parallel.buckets import balance
from systems.parallel.collectives import ReducedBuckets
from systems.parallel.ddp import BucketedDDP
from systems.parallel.peer_memory import can_pull
from systems.parallel.pulled_average import PulledBuckets


class PulledDDP(BucketedDDP):
    """DDP wrapper whose ranks pull the gradients from each other's memory, during backward.

    On GPUs of one host that can read each other's memory, copy engines move the gradients, and not
    multiprocessors, see `pulled_average`. Gradients are views of a buffer for all gradients. On a
    CPU, the ranks share memory.

    Elsewhere, for example on several hosts, the wrapper is a `BucketedDDP`, and warns.

    A `ShardedOptimizer` with shard_gradients=True lets each rank keep only the gradients of the
    parameters that it updates. Then clip gradients by the method `clip_grad_norm_`, and scale the
    loss with torch's `ShardedGradScaler`, because a rank does not see the other gradients.

    The next backward overwrites the gradients. To keep one, clone it.
    """

    _not_copied = (*BucketedDDP._not_copied, "_owners", "_means", "_kept")
    _owners: dict[Tensor, int] | None = None  # with sharded gradients
    # Parameters with a mean that only this rank has. While gradients of another backward arrive,
    # which all ranks have, these means are in `_kept`. They are added to the new means in the end.
    _means: Mapping[nn.Parameter, Tensor] = MappingProxyType({})
    _kept: Mapping[nn.Parameter, Tensor] = MappingProxyType({})

    def shard_gradients(self, owners: Mapping[Tensor, int]) -> None:
        """Keep only the gradients of the parameters that this rank owns from now on.

        All ranks must call this function, with the rank of each parameter. See `ShardedOptimizer`.

        Raises:
            ValueError: if a trainable parameter of the module is missing.
        """
        self._owners, self._means, self._kept = dict(owners), {}, {}
        self._arrange()

    def _make_exchange(self) -> ReducedBuckets | PulledBuckets:
        devices = {parameter.device for parameter in self._trained}
        if not devices or not can_pull(self._group, devices, "gradients are all-reduced"):
            return super()._make_exchange()
        owners = self._owners
        if owners is None:
            ranks = balance([p.nbytes for p in self._trained], [0] * self._group.size())
            owners = dict(zip(self._trained, ranks, strict=True))
        left = [n for n, p in self.named_parameters() if p.requires_grad and p not in owners]
        if left:
            raise ValueError(
                f"with shard_gradients=True, the optimizer must have all trainable parameters of "
                f"the module, but {left[0]} is missing"
            )
        return PulledBuckets(
            self._buckets, owners, self._group, owners_only=self._owners is not None
        )

    def _gradient(self, index: int, parameter: Any) -> None:
        if self._backward is None and parameter in self._means:
            # Backward began outside of the wrapper, so this gradient has arrived already.
            if parameter.grad is self._means[parameter]:
                raise RuntimeError(
                    "with shard_gradients=True, call zero_grad(set_to_none=True) before a backward "
                    "that does not begin with an output of the wrapper, because it has already "
                    "added to a mean of this rank"
                )
            self._means = {p: mean for p, mean in self._means.items() if p is not parameter}
        super()._gradient(index, parameter)

    def _begin_backward(self) -> None:
        kept = dict(self._kept)
        for parameter in self._means:
            if parameter.requires_grad and parameter.grad is not None:
                kept[parameter] = parameter.grad.clone()
                parameter.grad = torch.zeros_like(parameter)  # None if the user zeroes it
        self._kept = {p: mean for p, mean in kept.items() if p.grad is not None}
        self._means = {p: mean for p, mean in self._means.items() if not p.requires_grad}

    def _end_backward(self) -> None:
        super()._end_backward()
        if self._synchronizing:  # and no parameter got a gradient, else there is nothing to add
            self._add_kept()

    def _average_replicated(self) -> None:
        self._begin_backward()  # if there was none
        super()._average_replicated()
        if self._owners is not None and self._sharded_parameters():
            for parameter in self._trained:
                if self._owners[parameter] != self._group.rank():
                    parameter.grad = None
            self._add_kept()
            means = {p: p.grad for p in self._trained if p.grad is not None}
            self._means = {**self._means, **means}

    def _abandon(self) -> None:
        super()._abandon()
        self._add_kept()

    @torch.no_grad()
    def _add_kept(self) -> None:
        for parameter, mean in self._kept.items():
            if parameter.grad is not None:
                parameter.grad.add_(mean)
        self._means = {**self._means, **{p: p.grad for p in self._kept if p.grad is not None}}
        self._kept = {}

    def _sharded_parameters(self) -> set[nn.Parameter]:
        sharded = self._owners is not None and isinstance(self._exchange, PulledBuckets)
        return set(self._trained) if sharded else set()
