"""Average gradients without a collective: every rank pulls what it needs from its peers.

Every parameter has an owner, the rank that averages its gradient. In `PeerMemory`, a bucket takes
these steps:

    1   Every rank writes its gradients of the others' parameters, divided by the number of ranks,
        into its buffer, and signals WRITTEN.
    2   Every rank pulls the gradients of its own parameters from all peers, writes the means into
        its buffer, and signals AVERAGED.
    3   Every rank pulls the means of the others' parameters from their owners, and signals READ.

A pull is a copy that the reader starts. On GPUs, copy engines run it. Multiprocessors only divide,
add, and wait for signals. So that they do little, a rank does not write its gradients of its own
parameters, which nobody pulls, and step 3 is left out if only owners need the means.

In step 3, a rank overwrites what it wrote in step 1, which the owner has read before it signals
AVERAGED. The next steps 1 and 2 overwrite what peers have pulled in steps 2 and 3. So in the end, a
rank waits for READ of all peers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from systems.parallel.peer_memory import ALIGNMENT, Aside, PeerMemory, aligned, make_peer_memory

WRITTEN, AVERAGED, READ = range(3)
IN_FLIGHT = 4  # largest number of buckets whose gradients are kept until they are added


class PulledBuckets:
    """Averages buckets of gradients by pulls, in a fixed order. See `ReducedBuckets`.

    The gradients of a bucket have one dtype and device. All ranks must have the same ones.

    Args:
        owners: rank of each parameter.
        owners_only: whether only the owner of a parameter gets the mean of its gradient.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[Tensor]],
        owners: Mapping[Tensor, int],
        group: dist.ProcessGroup,
        *,
        owners_only: bool = False,
    ):
        self._owners_only, device = owners_only, buckets[0][0].device
        nbytes = sum(aligned(parameter.nbytes) for bucket in buckets for parameter in bucket)
        self._memory = make_peer_memory(group, device, nbytes)
        self._buckets, start = list[_Bucket](), 0
        for index, bucket in enumerate(buckets):
            channel = 3 * (index % (self._memory.channels // 3))
            self._buckets.append(_Bucket(self._memory, bucket, owners, start, channel))
            start = self._buckets[-1].end
        # Where the gradients of a bucket arrive, those of a peer in each row
        width = max(ALIGNMENT, *(bucket.bytes_to_pull for bucket in self._buckets))
        shape = (IN_FLIGHT, len(self._memory.peers), width)
        self._arrived = torch.empty(shape, dtype=torch.uint8, device=device)
        # The sums that were started last, and the gradients that they read
        self._sums: list[tuple[Aside, list[Tensor]]] = []
        self._last: tuple[_Bucket, Aside] | None = None  # the bucket that was started last

    @torch.no_grad()
    def start(self, index: int, gradients: list[Tensor]) -> list[Tensor]:
        """Start to average the gradients of the next bucket, which has this index.

        Returns what the gradients are replaced by: views of the buffer of this rank, which have the
        means after `finish`.
        """
        if len(self._sums) == IN_FLIGHT:  # then `arrived` and the memory of gradients are free
            self._sums.pop(0)[0].wait()
        bucket, aside = self._buckets[index], self._memory.aside
        arrived = self._arrived[index % IN_FLIGHT]
        # Each waits for the one before, so that only the first one waits for the computation. More
        # edges would make a CUDA graph slower.
        work = aside(partial(bucket.write, gradients), "write")
        work = aside(partial(bucket.pull, arrived), "pull", work)
        signal = READ if self._owners_only else AVERAGED
        work = aside(partial(bucket.add, gradients, arrived, signal), "add", work)
        self._sums.append((work, gradients))
        if not self._owners_only:
            work = aside(bucket.collect, "collect", work)
        if self._last is not None:  # so the channels are free when a later bucket uses them again
            work = aside(self._last[0].await_readers, "collect", work)
        self._last = bucket, work
        # Other objects, whose `.data` the user may replace, with version counters of their own
        return [view.data for view in bucket.views]

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the means of all buckets that were started, and until all peers have read them.

        On a GPU, the current stream waits.
        """
        if self._last is not None:
            bucket, work = self._last
            self._memory.aside(bucket.await_readers, "collect", work).wait()
            self._last = None
        while self._sums:
            self._sums.pop(0)[0].wait()


class _Bucket:
    """The place of a bucket in the buffers, from byte `start` to byte `end`.

    The gradients of an owner's parameters are side by side.
    """

    def __init__(
        self,
        memory: PeerMemory,
        parameters: Sequence[Tensor],
        owners: Mapping[Tensor, int],
        start: int,
        channel: int,
    ):
        self._memory, self._channel, self.end = memory, channel, start
        self._places: list[tuple[int, int]] = []  # first and last byte, by owner
        views: dict[int, Tensor] = {}  # by the number of the parameter in the bucket
        self._own: dict[int, int] = {}  # first byte in what arrives
        for rank in range(len(memory.buffers)):
            start = self.end
            for i, parameter in enumerate(parameters):
                if owners[parameter] == rank:
                    views[i] = _view(memory.buffers[memory.rank][self.end :], parameter)
                    if rank == memory.rank:
                        self._own[i] = self.end - start
                    self.end += aligned(parameter.nbytes)
            self._places.append((start, self.end))
        self.views = [views[i] for i in range(len(parameters))]
        start, end = self._places[memory.rank]
        self.bytes_to_pull = end - start

    def write(self, gradients: list[Tensor]) -> None:
        for i, (gradient, view) in enumerate(zip(gradients, self.views, strict=True)):
            if i not in self._own:
                torch.mul(gradient, 1 / len(self._places), out=view)
        self._memory.signal(self._channel + WRITTEN)

    def pull(self, arrived: Tensor) -> None:
        start, end = self._places[self._memory.rank]
        for peer, row in zip(self._memory.peers, arrived, strict=True):
            self._memory.wait(peer, self._channel + WRITTEN)
            row[: end - start].copy_(self._memory.buffers[peer][start:end])

    def add(self, gradients: list[Tensor], arrived: Tensor, signal: int) -> None:
        for i, start in self._own.items():
            pieces = [_view(row[start:], self.views[i]) for row in arrived]
            write_mean(self.views[i], gradients[i], pieces)
        self._memory.signal(self._channel + signal)

    def collect(self) -> None:
        mine = self._memory.buffers[self._memory.rank]
        for peer in self._memory.peers:
            self._memory.wait(peer, self._channel + AVERAGED)
            start, end = self._places[peer]
            mine[start:end].copy_(self._memory.buffers[peer][start:end])
        self._memory.signal(self._channel + READ)

    def await_readers(self) -> None:
        self._memory.wait_for_all(self._channel + READ)


def write_mean(mean: Tensor, gradient: Tensor, arrived: list[Tensor]) -> None:
    """Write the mean of a gradient and of those that arrived, which are divided already.

    Sums have at least float32, and are rounded once.
    """
    share, halves = 1 / (len(arrived) + 1), (torch.float16, torch.bfloat16)
    total = mean
    if gradient.dtype in halves and (mean.dtype not in halves or len(arrived) > 1):
        total = torch.empty_like(mean, dtype=torch.float32) if mean.dtype in halves else mean
        gradient = total.copy_(gradient)
    torch.add(arrived[0], gradient, alpha=share, out=total)
    for each in arrived[1:]:
        total.add_(each)
    if total is not mean:
        mean.copy_(total)


def _view(memory: Tensor, like: Tensor) -> Tensor:
    """Return a tensor at the start of a memory, with the shape and the strides of a dense copy."""
    flat = memory[: like.nbytes].view(like.dtype)
    strides = torch.empty_like(like, device="meta").stride()
    return flat.as_strided(like.shape, strides, flat.storage_offset())
