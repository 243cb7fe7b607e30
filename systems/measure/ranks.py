"""Functions for benchmarks that run under torchrun: process group, barrier, gather of objects."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from systems.measure.timing import synchronize
from systems.process_group import process_group


@contextlib.contextmanager
def rank_process_group(backend: str, world_size: int) -> Iterator[torch.device]:
    """Initialize the process group of torchrun's processes, gloo or nccl; yield this rank's device.

    The process group is destroyed when the context ends without an exception.

    Raises:
        RuntimeError: if the process was not started by torchrun, if torchrun did not start
            `world_size` processes, or if the backend is nccl and this rank has no GPU.
    """
    with process_group(backend) as device:
        started = dist.get_world_size()
        if started != world_size:
            raise RuntimeError(
                f"world_size must be {started}, the number of processes that torchrun started "
                f"(nodes times launch.nproc_per_node), got {world_size}"
            )
        yield device


def barrier(device: torch.device) -> None:
    """Wait until all ranks have called this function and the GPUs of all ranks are idle."""
    synchronize(device)
    dist.barrier()
    synchronize(device)


def all_gather_objects(value: Any) -> list[Any]:
    """Return the values of all ranks, sent by pickle, in rank order. All ranks must call this."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
