"""Measure the memory of weights, gradients and optimizer state in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return the total bytes of the storages of tensors. Each counts once, and None as 0."""
    sizes = {storage_address(t): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(sizes.values())


def storage_address(tensor: Tensor) -> int:
    """Return the address of the storage of a tensor. Empty storages can share the address 0."""
    return tensor.untyped_storage().data_ptr()


def state_bytes(
    parameters: Iterable[torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, int]:
    """Return weights_bytes, gradients_bytes and optimizer_state_bytes on this rank.

    Of a DTensor, only the shard of this rank counts. The state of an optimizer includes that of
    inner optimizers, in which a sharded optimizer may keep the state of its shard.
    """
    weights = list(parameters)
    kinds: dict[str, Iterable[Tensor | None]] = {
        "weights_bytes": weights,
        "gradients_bytes": [p.grad for p in weights],
        "optimizer_state_bytes": [
            value
            for values in _states(optimizer)
            for value in values.values()
            if isinstance(value, Tensor)
        ],
    }
    return {name: storage_bytes(map(_local, tensors)) for name, tensors in kinds.items()}


def _states(optimizer: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
    """Yield the states of the parameters, also those in inner optimizers."""
    seen: set[int] = set()
    waiting: list[Any] = [optimizer]
    while waiting:
        item = waiting.pop()
        if isinstance(item, (list, tuple)):
            waiting += item
        elif isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, torch.optim.Optimizer) and id(item) not in seen:
            seen.add(id(item))
            yield from item.state.values()
            waiting += [value for name, value in vars(item).items() if name != "state"]


def _local(tensor: Tensor | None) -> Tensor | None:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
