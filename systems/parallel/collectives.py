"""Collectives of DDP and FSDP, and the process group of these and of the sharded optimizer."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

# Its default arguments keep the default group alive if it is first imported later, as by AdamW.
import torch.distributed.nn.functional
from torch import Tensor
from torch._C._distributed_c10d import _broadcast_coalesced
from torch.distributed.distributed_c10d import AllreduceCoalescedOptions

BROADCAST_BYTES = 250 * 10**6  # of a broadcast of several tensors, as in torch's DDP


def group_or_world(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Return `group`, or the default process group if `group` is None.

    Raises:
        RuntimeError: if there is no process group.
    """
    group = group or dist.group.WORLD
    if group is None:
        raise RuntimeError(
            "no process group: call torch.distributed.init_process_group first, or run inside "
            "`with systems.parallel.process_group(...)`"
        )
    return group


class GroupOf:
    """The process group of an object: the given one, or the default one at the time of the call.

    The group is not kept alive, because only its destructor ends Gloo's threads. A thread that is
    alive when Python ends can abort the process (pytorch 190489).
    """

    def __init__(self, given: dist.ProcessGroup | None):
        self._given = None if given is None else weakref.ref(given)

    def __call__(self) -> dist.ProcessGroup:
        group = None if self._given is None else self._given()
        if self._given is not None and group is None:
            raise RuntimeError("the process group was destroyed")
        return group_or_world(group)


def is_wanted(to: int | None, group: dist.ProcessGroup) -> bool:
    """Return whether a state is for this rank: `to` is its rank, or None for all ranks."""
    if to is not None and not 0 <= to < group.size():
        raise ValueError(f"`to` must be a rank from 0 to {group.size() - 1}, got {to}")
    return to is None or to == group.rank()


def mean_operation(tensors: list[Tensor], group: dist.ProcessGroup) -> dist.ReduceOp:
    """Return the operation whose result is the mean of tensors over the ranks.

    Only NCCL has ReduceOp.AVG. Otherwise this function divides the tensors in place, and returns
    SUM. Division before the sum also avoids overflow in float16.
    """
    if dist.get_backend(group) == "nccl":
        return dist.ReduceOp(dist.ReduceOp.AVG)
    torch._foreach_div_(tensors, group.size())
    return dist.ReduceOp(dist.ReduceOp.SUM)


def is_gloo_only(group: dist.ProcessGroup) -> bool:
    """Return whether the group uses Gloo also for tensors on a GPU, where Gloo cannot coalesce.

    torch's names are such as `gloo`, `cpu:gloo,cuda:nccl`, or `undefined`: Gloo and NCCL.
    """
    name = dist.get_backend(group)
    return "gloo" in name and "nccl" not in name


class Transfer(NamedTuple):
    """A collective that was started. See `start_average` and `start_gather`."""

    works: list[dist.Work]
    # These references keep the tensors alive while Gloo's thread uses them (pytorch issue 75529).
    tensors: list[Tensor]
    copies: Sequence[tuple[Tensor, Tensor]] = ()  # (strided tensor, its contiguous copy)

    def wait(self) -> None:
        """Wait until the results are complete.

        With NCCL, the current stream waits and the host does not block.

        Raises:
            RuntimeError: if another rank has exited or the timeout has expired.
        """
        for work in self.works:
            work.wait()
        for tensor, copy in self.copies:
            tensor.copy_(copy)


def start_average(tensors: list[Tensor], group: dist.ProcessGroup) -> Transfer:
    """Start an all-reduce that replaces `tensors` by their means over the ranks, in place.

    All tensors have the same dtype and device. One coalesced collective reduces them, which NCCL
    runs in one launch. So they need not be copied into one flat tensor. Gloo reduces CUDA tensors
    one by one. Call `wait` of the result before you use the tensors.
    """
    copies = []
    if not all(tensor.is_contiguous() for tensor in tensors):
        dense = [tensor.contiguous() for tensor in tensors]
        copies = [pair for pair in zip(tensors, dense, strict=True) if pair[0] is not pair[1]]
        tensors = dense
    # Gloo refuses contiguous tensors with an unusual stride in a dimension of size 1.
    tensors = [tensor.view(-1) for tensor in tensors]
    options = AllreduceCoalescedOptions()
    options.reduceOp, options.asyncOp = mean_operation(tensors, group), True
    # This calls the process group directly, because the wrapper in torch.distributed takes another
    # 10 us of host time per call.
    if tensors[0].is_cuda and is_gloo_only(group):
        works = [group.allreduce(tensor, options.reduceOp) for tensor in tensors]
    else:
        works = [group.allreduce_coalesced(tensors, options)]
    return Transfer(works, tensors, copies)


class ReducedBuckets:
    """Averages buckets of gradients by all-reduces, in place. An `Exchange` of DDP wrappers."""

    def __init__(self, group_of: GroupOf):
        self._group_of, self._running = group_of, list[Transfer]()

    def start(self, index: int, gradients: list[Tensor]) -> list[Tensor]:
        self._running.append(start_average(gradients, self._group_of()))
        return gradients

    def finish(self) -> None:
        running, self._running = self._running, []
        for average in running:
            average.wait()


def start_gather(outputs: list[Tensor], inputs: list[Tensor], group: dist.ProcessGroup) -> Transfer:
    """Start to all-gather several tensors. Call `wait` of the result before you use the outputs.

    Each output becomes the concatenation of the inputs of all ranks, in rank order. All are
    one-dimensional, of the same dtype and device. An input may be the slice of its output into
    which the values of this rank go.
    """
    if dist.get_backend(group) == "nccl":
        works = [group.allgather_into_tensor_coalesced(outputs, inputs)]
    else:  # Gloo corrupts memory if several coalesced all-gathers are in flight (pytorch 65231)
        pairs = zip(outputs, inputs, strict=True)
        works = [group._allgather_base(output, piece) for output, piece in pairs]
    return Transfer(works, [*outputs, *inputs])


@torch.no_grad()
def broadcast_from_first(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite `tensors` with the values of rank 0. They may have any dtype and any strides."""
    # `.data` because autograd may have saved a buffer, whose values backward does not use.
    given = [tensor.data for tensor in tensors if tensor.numel()]
    if not given:
        return
    dense = [tensor.contiguous() for tensor in given]
    # Sent as bytes, because Gloo does not support every dtype.
    as_bytes = [tensor.view(-1).view(torch.uint8) for tensor in dense]
    _broadcast_coalesced(group, as_bytes, BROADCAST_BYTES, 0)
    for tensor, sent in zip(given, dense, strict=True):
        if not tensor.is_contiguous():
            tensor.copy_(sent)
