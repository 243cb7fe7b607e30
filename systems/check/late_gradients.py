"""Finds wrappers whose communication goes on after they have finished gradient synchronization."""

from __future__ import annotations

import torch
from torch import Tensor

from systems.benchmark import WrongOutput
from systems.check.problems import listed
from systems.measure.ranks import all_gather_objects
from systems.training.parallel_training import ParallelTraining

CHANGED = "gradients changed after finish_gradient_synchronization had returned"


def watch_gradients(training: ParallelTraining) -> None:
    """Let a training keep its gradients after synchronization and compare them before the update.

    A check of gradients computes for a while before it reads them. Communication that is still
    running then ends in this time, and wrong code looks right.

    Afterwards, `training.optimizer_step` raises WrongOutput on all ranks if a gradient of any rank
    has changed since `training.synchronize_gradients`. All ranks must call both.
    """
    synchronize, step = training.synchronize_gradients, training.optimizer_step
    kept: dict[str, Tensor] | None = None  # None: not synchronized since the last update

    def synchronize_and_keep() -> None:
        nonlocal kept
        synchronize()
        kept = {name: gradient.clone() for name, gradient in _gradients(training).items()}

    def compare_and_step() -> None:
        nonlocal kept
        if kept is not None:
            now = _gradients(training)
            names = {**kept, **now}  # also those that appeared or disappeared
            changed = [name for name in names if not _same(kept.get(name), now.get(name))]
            by_rank = all_gather_objects(changed)
            kept = None
            if any(by_rank):
                rank, names = next((rank, names) for rank, names in enumerate(by_rank) if names)
                raise WrongOutput(f"{CHANGED}: rank {rank}: {listed(names)}")
        step()

    training.synchronize_gradients = synchronize_and_keep  # type: ignore[method-assign]
    training.optimizer_step = compare_and_step  # type: ignore[method-assign]


def _gradients(training: ParallelTraining) -> dict[str, Tensor]:
    """Return the gradients of this rank by name; of a shard, if the wrapper has shards."""
    named = training.wrapper.named_parameters()
    return {name: p.grad.detach() for name, p in named if p.grad is not None}


def _same(before: Tensor | None, now: Tensor | None) -> bool:
    if before is None or now is None or before.shape != now.shape:
        return False
    return torch.allclose(before, now, rtol=0, atol=0, equal_nan=True)
