"""A process group for the length of a `with`: torchrun's environment in, one device a rank out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist


@contextmanager
def process_group(backend: str, timeout_s: float = 120.0) -> Iterator[torch.device]:
    """Join the process group that torchrun's environment describes; leave it if all went well.

    Args:
        backend: gloo (CPU) or nccl (one GPU a rank, by LOCAL_RANK).
        timeout_s: seconds a collective may wait for the other ranks.

    Yields:
        The rank's device: cpu, or cuda:LOCAL_RANK.

    Raises:
        RuntimeError: not under torchrun, or nccl without a GPU for this rank.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"not under torchrun: {', '.join(missing)} not set; set launch.nproc_per_node"
        )
    device = torch.device("cpu")
    if backend == "nccl":
        local_rank = int(os.environ["LOCAL_RANK"])
        if local_rank >= torch.cuda.device_count():
            visible = torch.cuda.device_count()
            raise RuntimeError(
                f"nccl needs one GPU a rank: local rank {local_rank}, {visible} GPUs visible"
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if backend == "nccl" else None,
    )
    yield device
    # Not after an exception: to leave may mean to wait for ranks that wait for this one.
    dist.destroy_process_group()
