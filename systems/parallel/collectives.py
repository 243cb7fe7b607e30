"""A process group for the length of a `with`, and the collectives that the wrappers share."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllreduceCoalescedOptions


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


def group_or_world(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """`group`, or the group of all ranks.

    Raises:
        RuntimeError: neither is there.
    """
    group = group or dist.group.WORLD
    if group is None:
        raise RuntimeError(
            "no process group: call torch.distributed.init_process_group first, or stand inside "
            "`with systems.parallel.process_group(...)`"
        )
    return group


def averages_itself(group: dist.ProcessGroup) -> bool:
    """Whether the backend has ReduceOp.AVG; the others are given tensors divided beforehand, which
    keeps a sum of float16 in range, too."""
    return dist.get_backend(group) == "nccl"


def mean_or_sum(group: dist.ProcessGroup) -> dist.ReduceOp:
    """What makes a mean of tensors, or of those that were divided beforehand."""
    return dist.ReduceOp(dist.ReduceOp.AVG if averages_itself(group) else dist.ReduceOp.SUM)


class Average(NamedTuple):
    """An all-reduce that is on its way."""

    work: dist.Work
    # Kept: to let go of a tensor that Gloo's thread works on races with it (pytorch issue 75529).
    tensors: list[Tensor]
    copies: list[tuple[Tensor, Tensor]]  # what a collective cannot write, and what it wrote

    def wait(self) -> None:
        """Gloo: until it is done. NCCL: the current stream waits, the host does not.

        Raises:
            RuntimeError: a rank is gone, or the timeout is over.
        """
        self.work.wait()
        for tensor, copy in self.copies:
            tensor.copy_(copy)


def start_average(tensors: list[Tensor], group: dist.ProcessGroup) -> Average:
    """Begin to replace `tensors`, all of one dtype and device, by their means over the ranks.

    One collective for all of them where they lie: NCCL merges them into one launch, so there is no
    flat copy to make and none to keep. Do not touch them before `wait()`.
    """
    copies = []
    if not all(tensor.is_contiguous() for tensor in tensors):
        made = [tensor.contiguous() for tensor in tensors]
        copies = [pair for pair in zip(tensors, made, strict=True) if pair[0] is not pair[1]]
        tensors = made
    options = AllreduceCoalescedOptions()
    options.reduceOp, options.asyncOp = mean_or_sum(group), True
    if not averages_itself(group):
        torch._foreach_div_(tensors, group.size())
    # The group's own method: torch.distributed's wrapper around it costs the host 10 us a call.
    return Average(group.allreduce_coalesced(tensors, options), tensors, copies)


class Gather(NamedTuple):
    """An all-gather that is on its way."""

    works: list[dist.Work]
    tensors: list[Tensor]  # kept, as in Average

    def wait(self) -> None:
        """As `Average.wait`."""
        for work in self.works:
            work.wait()


def start_gather(outputs: list[Tensor], inputs: list[Tensor], group: dist.ProcessGroup) -> Gather:
    """Begin to lay the inputs of all ranks, in order, end to end in the outputs.

    Args:
        outputs, inputs: pairs of one dimension, all of one dtype and device. An input may be the
            part of its output where it belongs.
    """
    if dist.get_backend(group) == "nccl":
        works = [group.allgather_into_tensor_coalesced(outputs, inputs)]
    else:  # Gloo's corrupts memory when several are on their way (as in pytorch issue 65231)
        pairs = zip(outputs, inputs, strict=True)
        works = [group._allgather_base(output, piece) for output, piece in pairs]
    return Gather(works, [*outputs, *inputs])


@torch.no_grad()
def broadcast_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite `tensors`, of any dtypes, by those of the group's rank 0."""
    running = []
    for tensor in tensors:
        if not tensor.numel():
            continue
        sent = tensor.detach().contiguous()
        # As bytes: not every backend knows every dtype.
        as_bytes = sent.view(-1).view(torch.uint8)
        work = dist.broadcast(as_bytes, group=group, group_src=0, async_op=True)
        running.append((work, tensor, sent, as_bytes))
    for work, tensor, sent, _ in running:
        work.wait()
        if not tensor.is_contiguous():
            tensor.copy_(sent)
