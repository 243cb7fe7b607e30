"""Ranks of a benchmark that meet: to begin together, and to tell each other what they found."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from systems.benchmarks.step_timing import synchronize


def check_world_size(expected: int) -> None:
    """
    Raises:
        RuntimeError: torchrun started another number of processes.
    """
    started = dist.get_world_size()
    if started != expected:
        raise RuntimeError(
            f"world_size is {expected}, but torchrun started {started} processes; "
            "set launch.nproc_per_node: $world_size"
        )


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
