"""Ranks of a benchmark that meet: to begin together, and to tell each other what they found."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from systems.parallel import process_group
from systems.training.step_timing import synchronize


@contextlib.contextmanager
def ranks_of(backend: str, world_size: int) -> Iterator[torch.device]:
    """`systems.parallel.process_group` of torchrun's processes, of which there are to be this many.

    Raises:
        RuntimeError: torchrun started another number of processes.
    """
    with process_group(backend) as device:
        started = dist.get_world_size()
        if started != world_size:
            raise RuntimeError(
                f"world_size is {world_size}, but torchrun started {started} processes; "
                "set launch.nproc_per_node: $world_size"
            )
        yield device


def meet(device: torch.device) -> None:
    """All ranks, with idle GPUs."""
    synchronize(device)
    dist.barrier()
    synchronize(device)


def of_all_ranks(value: Any) -> list[Any]:
    """Everybody's, by rank. A collective."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone
