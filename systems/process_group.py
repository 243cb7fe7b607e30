"""The process group of the processes that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist


@contextmanager
def process_group(backend: str, timeout_s: float = 120.0) -> Iterator[torch.device]:
    """Initialize the default process group, yield the device of this rank, and destroy the group.

    The device is cpu with "gloo", and cuda:LOCAL_RANK with "nccl". If the block raises an
    exception, the process group is not destroyed.

    Raises:
        RuntimeError: if the process was not started by torchrun, or if the backend is nccl and
            this rank has no GPU.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name not in os.environ]
    if missing:
        raise RuntimeError(
            "the process must be started by torchrun, but these environment variables are not set: "
            f"{', '.join(missing)}; set launch.nproc_per_node in the sweep"
        )
    device = torch.device("cpu")
    if backend == "nccl":
        local_rank = int(os.environ["LOCAL_RANK"])
        if local_rank >= torch.cuda.device_count():
            visible = torch.cuda.device_count()
            raise RuntimeError(
                f"nccl needs one GPU per rank, got {visible} GPUs for local rank {local_rank}"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if backend == "nccl" else None,
    )
    yield device
    # This is not in a `finally` block, because after an exception other ranks may still wait in a
    # collective for this rank, and destroying the process group can deadlock.
    dist.destroy_process_group()
