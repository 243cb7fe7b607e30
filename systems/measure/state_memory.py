"""Count the bytes that live tensors hold: weights, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the tensors' storages; one that several share counts once, None not at all."""
    sizes = {storage_address(t): t.untyped_storage().nbytes() for t in tensors if t is not None}
    return sum(sizes.values())


def storage_address(tensor: Tensor) -> int:
    """Address of the tensor's storage, which tells two storages apart while both are alive."""
    return tensor.untyped_storage().data_ptr()


def state_bytes(
    parameters: Iterable[torch.nn.Parameter], optimizer: torch.optim.Optimizer
) -> dict[str, int]:
    """Bytes of the parameters, of their gradients and of the optimizer's state; of a DTensor, of
    this rank's part."""
    weights = list(parameters)
    kinds: dict[str, Iterable[Tensor | None]] = {
        "weights_bytes": weights,
        "gradients_bytes": [p.grad for p in weights],
        "optimizer_state_bytes": [
            value
            for values in optimizer.state.values()
            for value in values.values()
            if isinstance(value, Tensor)
        ],
    }
    return {name: storage_bytes(map(_local, tensors)) for name, tensors in kinds.items()}


def _local(tensor: Tensor | None) -> Tensor | None:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
