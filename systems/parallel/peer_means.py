"""Average tensors without a collective: every rank copies what it has to the rank that adds it up.

Every tensor has an owner, the rank that averages it. The buffer of an owner has a few slots for
what arrives, each with a row for every peer. An average takes these steps:

    send    Every rank copies its tensors into its row of a slot at their owners, and signals SENT.
    add     An owner waits for the others, and writes the means, in one pass over memory.
    spread  An owner copies the means to where the others want them, if they do. It signals ADDED.
    end     Every rank waits for ADDED of all others.

On GPUs, copy engines run the copies, also while multiprocessors compute. Multiprocessors only add,
and wait for signals. Every step has a lane of its own, so that steps of several averages overlap.
A slot is used again when its last average has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from systems.parallel.buckets import packed_bytes, places
from systems.parallel.peer_memory import Aside, PeerMemory

SENT, ADDED = range(2)


class PeerMeans:
    """Averages of tensors, in the same order on all ranks.

    Args:
        width: largest number of bytes that one rank sends to another at once, see `packed_bytes`.
            A multiple of `ALIGNMENT`.
        slots: largest number of averages at the same time. They are at the start of the buffers and
            use the first `2 * slots` channels.
    """

    def __init__(self, memory: PeerMemory, width: int, slots: int):
        self._memory, self._width, self._slots = memory, width, slots
        # The last step of each average, and tensors that must not be freed before it
        self._running: deque[tuple[Aside, object]] = deque()
        self._count = 0  # number of averages since `finish`

    @staticmethod
    def nbytes(width: int, slots: int, ranks: int) -> int:
        """Return the bytes of the slots in a buffer."""
        return width * slots * (ranks - 1)

    def start(
        self,
        tensors: Sequence[Sequence[Tensor]],
        means: Sequence[Tensor],
        spread: Callable[[], None] | None = None,
    ) -> Aside:
        """Start to average tensors. On a GPU, the current stream waits if no slot is free.

        Args:
            tensors: contiguous and one-dimensional, those that each rank owns.
            means: where the means of what this rank owns are written. They may be its tensors.
            spread: copies the means to the others.

        Returns:
            The step `add`. After it, this rank may use the means that it has written.
        """
        if self._count >= self._slots:
            self._running.popleft()[0].wait()
        slot = self._count % self._slots
        self._count += 1
        aside = self._memory.aside
        # Each waits for the one before, so that only the first one waits for the computation. More
        # edges would make a CUDA graph slower.
        work = aside(partial(self._send, slot, tensors), "send")
        own = tensors[self._memory.rank]
        added = work = aside(partial(self._add, slot, own, means, spread is None), "add", work)
        if spread is not None:
            work = aside(partial(self._spread, slot, spread), "spread", work)
        work = aside(partial(self._memory.wait_for_all, 2 * slot + ADDED), "end", work)
        self._running.append((work, (tensors, means)))
        return added

    def finish(self) -> None:
        """Wait until all averages have ended on this rank. On a GPU, the current stream waits."""
        if self._running:
            self._running[-1][0].wait()
        self._running.clear()
        self._count = 0  # so the next step, or graph, begins as this one

    def _row(self, slot: int, owner: int, sender: int) -> Tensor:
        row = len(self._memory.peers) * slot + sender - (sender > owner)
        return self._memory.buffers[owner][row * self._width :][: self._width]

    @torch.no_grad()
    def _send(self, slot: int, tensors: Sequence[Sequence[Tensor]]) -> None:
        for peer in self._memory.peers:
            row = self._row(slot, peer, self._memory.rank)
            for tensor, place in zip(tensors[peer], places(row, tensors[peer]), strict=True):
                place.copy_(tensor)
        self._memory.signal(2 * slot + SENT)

    @torch.no_grad()
    def _add(
        self, slot: int, own: Sequence[Tensor], means: Sequence[Tensor], signals: bool
    ) -> None:
        from systems.kernels.mean import write_mean  # imports Triton

        self._memory.wait_for_all(2 * slot + SENT)
        size = len(self._memory.peers) * self._width
        arrived = self._memory.buffers[self._memory.rank][slot * size :][:size]
        rows, start = arrived.view(-1, self._width), 0
        for mean, tensor in zip(means, own, strict=True):
            write_mean(mean, tensor, rows[:, start : start + tensor.nbytes].view(tensor.dtype))
            start += packed_bytes([tensor])
        if signals:
            self._memory.signal(2 * slot + ADDED)

    def _spread(self, slot: int, spread: Callable[[], None]) -> None:
        spread()
        self._memory.signal(2 * slot + ADDED)
