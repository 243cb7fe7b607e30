"""Check a fully sharded training against a single process that trains on the batches of all ranks.

Weights and gradients are gathered from their shards for the comparison.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from systems.benchmark import WrongOutput
from systems.check.parallel_training import check_again, check_parallel
from systems.parallel import FullyShardedDataParallel
from systems.training.external_wrappers import full_gradients_by_update, full_parameters
from systems.training.parallel_training import ParallelTraining


def _plain_name(name: str) -> str:
    """Remove the prefix that torch.compile adds to the parameter names of a compiled block."""
    return name.replace("_orig_mod.", "")


def check_sharded(
    training: ParallelTraining, alone: ParallelTraining, again: bool = False
) -> dict[str, float]:
    """Compare a fully sharded training with a training on one process.

    For the comparison, weights and gradients are gathered from their shards. All ranks must call
    this function. Arguments, result and exceptions are those of `check_parallel` in
    `systems.check.parallel_training`, or with `again` those of `check_again`.
    """
    shapes = {name: p.shape for name, p in alone.model.named_parameters()}
    gradients_of: Any = partial(full_gradients, shapes=shapes)
    weights_of: Any = full_weights
    if not isinstance(training.wrapper, (FullyShardedDataParallel, FSDPModule)):
        gradients_of = lambda training: full_gradients_by_update(training.wrapper, shapes)  # noqa: E731
        weights_of = lambda training: full_parameters(training.wrapper, shapes)  # noqa: E731
    if again:
        return check_again(training, alone, gradients_of, weights_of)
    return check_parallel(training, alone, gradients_of, weights_of, master_weights)


def full_gradients(
    training: ParallelTraining, shapes: Mapping[str, torch.Size]
) -> Iterator[tuple[str, Tensor]]:
    """Gather the averaged gradients from the shards of all ranks.

    All ranks must call this function. `synchronize_gradients` of the training was called. `shapes`
    are those of the unsharded parameters.

    Raises:
        WrongOutput: if a parameter has no gradient.
    """
    for compiled_name, parameter in training.model.named_parameters():
        name, grad = _plain_name(compiled_name), parameter.grad
        shape = shapes[name]
        if grad is None:
            raise WrongOutput(f"backward computed no gradient for {name}")
        if isinstance(grad, DTensor):
            yield name, grad.full_tensor()
        elif grad.shape == shape:
            yield name, grad
        else:
            width = -(-shape.numel() // dist.get_world_size())
            piece = grad.new_zeros(width)
            piece[: grad.numel()] = grad.reshape(-1)
            pieces = [torch.empty_like(piece) for _ in range(dist.get_world_size())]
            dist.all_gather(pieces, piece)
            yield name, torch.cat(pieces)[: shape.numel()].view(shape)


def full_weights(training: ParallelTraining) -> Mapping[str, Tensor]:
    """Gather the weights from the shards of all ranks and return them by name.

    The weights have the dtype of the shards, which the optimizer updates. All ranks must call this
    function.
    """
    if isinstance(training.wrapper, FullyShardedDataParallel):
        return training.wrapper.gather_full_parameters()
    return {
        _plain_name(name): p.full_tensor().detach() if isinstance(p, DTensor) else p.detach()
        for name, p in training.model.named_parameters()
    }


def master_weights(training: ParallelTraining) -> Mapping[str, Tensor]:
    """Return the weights that the optimizer updates, in a training without sharding, by name.

    For a bf16 weight that has a float32 master weight, the result contains the master weight. For
    every other weight, the result contains the weight itself.
    """
    state = training.optimizer.state
    return {
        name: state[p].get("master", p.detach()) for name, p in training.model.named_parameters()
    }
