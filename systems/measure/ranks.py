"""Start, synchronise and gather from the ranks of a benchmark under torchrun."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from systems.measure.timing import synchronize
from systems.parallel import process_group


@contextlib.contextmanager
def rank_process_group(backend: str, world_size: int) -> Iterator[torch.device]:
    """Join `systems.parallel.process_group` and check its size; yields this rank's device.

    Raises:
        RuntimeError: torchrun started another number of processes than `world_size`.
    """
    with process_group(backend) as device:
        started = dist.get_world_size()
        if started != world_size:
            raise RuntimeError(
                f"world_size is {world_size}, but torchrun started {started} processes; "
                "set launch.nproc_per_node: $world_size"
            )
        yield device


def barrier(device: torch.device) -> None:
    """Wait until all ranks are here and their GPUs are idle."""
    synchronize(device)
    dist.barrier()
    synchronize(device)


def all_gather_objects(value: Any) -> list[Any]:
    """Return the values of all ranks, in rank order; values are pickled. A collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
