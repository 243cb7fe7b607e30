"""Errors of FSDP, and the end of all ranks if one rank exits.

A function whose first argument is a `RankContext` is a case: every rank runs it, several times.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

from systems.parallel import FullyShardedDataParallel
from tests.systems.parallel.parallel_models import batch, build, loss_of
from tests.systems.parallel.ranks import RankContext, two_ranks, world


def what_is_refused(here: RankContext) -> None:
    model = nn.Sequential(nn.Linear(3, 4 + (here.rank == 1)), nn.Linear(4, 2)).to(here.device)
    with pytest.raises(
        ValueError, match=r"rank 1 has '0.weight float32 \(5, 3\)' at position 0, bu"
    ):
        FullyShardedDataParallel(model)
    wrapped = FullyShardedDataParallel(nn.Embedding(4, 2, sparse=True).to(here.device))
    with pytest.raises(RuntimeError, match="gradients must be dense"):
        wrapped(torch.tensor([1], device=here.device)).sum().backward()


def dies_in_the_middle_of_backward(here: RankContext) -> None:
    wrapped = FullyShardedDataParallel(build("transformer", 0, here.device))
    for step in range(3):
        if step == 1 and here.rank == 1:
            hook = wrapped.module.blocks[1].register_full_backward_hook
            hook(lambda *_: os._exit(9))
        loss_of(wrapped, *batch("transformer", step, here.device)).backward()
        wrapped.finish_gradient_synchronization()


@two_ranks
def test_what_is_refused(ranks):
    ranks.assert_passes(what_is_refused)


def test_a_rank_that_dies_ends_the_others():
    with world("gloo", 3) as ranks:
        ranks.assert_one_death_ends_all(dies_in_the_middle_of_backward)
