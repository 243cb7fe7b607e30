"""Gathers weights and gradients from their shards, to compare them with those of one process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from systems.check.parallel_training import Whole, local_gradients, local_weights
from systems.measure.ranks import all_gather_objects
from systems.parallel import FullyShardedDataParallel
from systems.training.external_wrappers import full_gradients_by_update, full_parameters
from systems.training.parallel_training import ParallelTraining


def gathered(training: ParallelTraining, alone: ParallelTraining) -> Whole:
    """Return how `check_parallel` gets the whole gradients and weights of a sharded training.

    All ranks must call these functions.
    """
    shapes = {name: p.shape for name, p in alone.model.named_parameters()}
    if isinstance(training.wrapper, (FullyShardedDataParallel, FSDPModule)):
        return Whole(partial(_full_gradients, shapes), _full_weights, _master_weights)
    return Whole(
        lambda training: full_gradients_by_update(training.wrapper, shapes),
        lambda training: full_parameters(training.wrapper, shapes),
        _master_weights,
    )


def _owned_gradients(training: ParallelTraining) -> Iterator[tuple[str, Tensor]]:
    """Yield gradients that one rank has, or all have."""
    for name, parameter in training.model.named_parameters():
        have = all_gather_objects(parameter.grad is not None)
        gradient = torch.empty_like(parameter) if parameter.grad is None else parameter.grad
        if any(have) and not all(have):
            dist.broadcast(gradient, have.index(True))
        if any(have):
            yield name, gradient


OWNED = Whole(_owned_gradients, local_weights)  # for trainings with shards of gradients


def _full_gradients(
    shapes: Mapping[str, torch.Size], training: ParallelTraining
) -> Iterator[tuple[str, Tensor]]:
    """Gather the averaged gradients. `shapes` are those of the unsharded parameters."""
    for name, grad in local_gradients(training):
        shape = shapes[name]
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


def _full_weights(training: ParallelTraining) -> Mapping[str, Tensor]:
    """Gather the weights, with the dtype of the shards, which the optimizer updates."""
    if isinstance(training.wrapper, FullyShardedDataParallel):
        return training.wrapper.gather_full_parameters()
    return {
        name: weight.full_tensor() if isinstance(weight, DTensor) else weight
        for name, weight in local_weights(training).items()
    }


def _master_weights(alone: ParallelTraining) -> Mapping[str, Tensor]:
    """Return the weights that the optimizer updates: the master weight of each that has one."""
    state = alone.optimizer.state
    return {name: state[p].get("master", p.detach()) for name, p in alone.model.named_parameters()}
