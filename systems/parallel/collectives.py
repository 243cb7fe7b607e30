"""A process group as a context manager, and the collectives that the wrappers share."""

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
    """Join torchrun's process group; destroy it at the end unless an exception was raised.

    Args:
        backend: gloo (CPU) or nccl (one GPU per rank, by LOCAL_RANK).
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
    # Not after an exception: destroying may wait for ranks that wait for this one.
    dist.destroy_process_group()


def group_or_world(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return `group`, or the default group of all ranks.

    Raises:
        RuntimeError: there is neither.
    """
    group = group or dist.group.WORLD
    if group is None:
        raise RuntimeError(
            "no process group: call torch.distributed.init_process_group first, or run inside "
            "`with systems.parallel.process_group(...)`"
        )
    return group


def supports_average(group: dist.ProcessGroup) -> bool:
    """Return True if the backend has ReduceOp.AVG. For the others tensors are divided before they
    are summed, which also keeps sums of float16 in range."""
    return dist.get_backend(group) == "nccl"


def mean_or_sum(group: dist.ProcessGroup) -> dist.ReduceOp:
    """Return ReduceOp.AVG, or SUM for tensors that were divided by the number of ranks."""
    return dist.ReduceOp(dist.ReduceOp.AVG if supports_average(group) else dist.ReduceOp.SUM)


class Average(NamedTuple):
    """An all-reduce in flight."""

    work: dist.Work
    # Kept alive: freeing a tensor that Gloo's thread works on is a race (pytorch issue 75529).
    tensors: list[Tensor]
    copies: list[tuple[Tensor, Tensor]]  # (not contiguous, its contiguous copy)

    def wait(self) -> None:
        """Wait for the result. With NCCL the current stream waits and the host does not.

        Raises:
            RuntimeError: a rank is gone, or the timeout is over.
        """
        self.work.wait()
        for tensor, copy in self.copies:
            tensor.copy_(copy)


def start_average(tensors: list[Tensor], group: dist.ProcessGroup) -> Average:
    """Start to replace `tensors`, all of one dtype and device, by their means over the ranks.

    One coalesced collective in place: NCCL merges them into one launch, so no flat copy is made or
    kept. Do not use the tensors before `wait()`.
    """
    copies = []
    if not all(tensor.is_contiguous() for tensor in tensors):
        dense = [tensor.contiguous() for tensor in tensors]
        copies = [pair for pair in zip(tensors, dense, strict=True) if pair[0] is not pair[1]]
        tensors = dense
    options = AllreduceCoalescedOptions()
    options.reduceOp, options.asyncOp = mean_or_sum(group), True
    if not supports_average(group):
        torch._foreach_div_(tensors, group.size())
    # The group's own method: torch.distributed's wrapper around it costs the host 10 us a call.
    return Average(group.allreduce_coalesced(tensors, options), tensors, copies)


class Gather(NamedTuple):
    """An all-gather in flight."""

    works: list[dist.Work]
    tensors: list[Tensor]  # kept alive, as in Average

    def wait(self) -> None:
        """Wait for the result, as `Average.wait` does."""
        for work in self.works:
            work.wait()


def start_gather(outputs: list[Tensor], inputs: list[Tensor], group: dist.ProcessGroup) -> Gather:
    """Start to concatenate the inputs of all ranks, in rank order, into the outputs.

    Args:
        outputs, inputs: pairs of one-dimensional tensors, all of one dtype and device. An input may
            be the slice of its output that this rank fills.
    """
    if dist.get_backend(group) == "nccl":
        works = [group.allgather_into_tensor_coalesced(outputs, inputs)]
    else:  # Gloo's corrupts memory when several are on their way (as in pytorch issue 65231)
        pairs = zip(outputs, inputs, strict=True)
        works = [group._allgather_base(output, piece) for output, piece in pairs]
    return Gather(works, [*outputs, *inputs])


@torch.no_grad()
def broadcast_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite `tensors`, of any dtypes, with those of the group's rank 0."""
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
