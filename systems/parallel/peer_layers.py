"""Gather the weights of FSDP's layers, and average their gradients, through peers' memory.

It replaces `sharded_weights.LayerCollectives`. To gather a layer takes these steps in `PeerMemory`:

    1   Every rank writes its shards into its buffer, and signals WRITTEN.
    2   Every rank copies the shards of its peers, and signals READ.

The buffer has a place for the shard of every weight, so backward leaves out step 1 for what forward
has written. Gradients are averaged by `PeerMeans`: every rank owns the part of a gradient that
belongs to its shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from systems.parallel.buckets import ALIGNMENT, packed_bytes, places
from systems.parallel.peer_means import PeerMeans
from systems.parallel.peer_memory import PeerMemory, make_peer_memory
from systems.parallel.sharded_weights import Reduction, ShardedWeight
from systems.parallel.wrapper import in_backward


class PeerLayers:
    """Transfers of the weights of layers, and of their gradients.

    `slots` is the largest number of layers whose gradients are averaged at the same time.
    """

    def __init__(
        self, layers: Sequence[Sequence[ShardedWeight]], slots: int, group: dist.ProcessGroup
    ):
        self._ranks = group.size()
        # A shard with padding, in the dtype of communication
        parts = {
            weight: torch.empty(weight.width, dtype=weight.flat.dtype, device="meta")
            for weight in dict.fromkeys(weight for layer in layers for weight in layer)
        }
        width = max(ALIGNMENT, *(packed_bytes([parts[w] for w in layer]) for layer in layers))
        start = PeerMeans.nbytes(width, slots, self._ranks)
        device = next(iter(parts)).shard.device
        memory = make_peer_memory(group, device, start + packed_bytes(parts.values()))
        self._memory, self._means = memory, PeerMeans(memory, width, slots)
        # Places of the shards of each rank
        self._shards = [
            dict(zip(parts, places(buffer[start:], parts.values()), strict=True))
            for buffer in memory.buffers
        ]
        self._written: set[ShardedWeight] = set()  # weights written since peers were awaited
        self._gathers = _Turns(memory, range(2 * slots, memory.channels // 2 * 2))

    def gather(self, weights: list[ShardedWeight]) -> None:
        """Start to gather weights. See `LayerCollectives.gather`."""
        for weight in weights:
            weight.allocate()
        work = self._memory.aside(partial(self._gather, weights, in_backward()), "gather")
        for weight in weights:
            weight.gathering = work

    def _gather(self, weights: list[ShardedWeight], again: bool) -> None:
        memory = self._memory
        write = not (again and self._written.issuperset(weights))
        if write and not self._written.isdisjoint(weights):
            self._await_gathers()
        written, read = self._gathers.begin()
        if write:
            self._written.update(weights)
            for weight in weights:
                shard = weight.shard.detach().view(-1)
                self._shards[memory.rank][weight][: len(shard)].copy_(shard)
            memory.signal(written)
        for rank in (memory.rank, *memory.peers):
            if write and rank != memory.rank:
                memory.wait(rank, written)
            for weight in weights:
                part = weight.flat.narrow(0, rank * weight.width, weight.width)
                part.copy_(self._shards[rank][weight])
        memory.signal(read)

    @torch.no_grad()
    def reduce(self, weights: list[ShardedWeight]) -> Reduction:
        """Start to average the gradients of unsharded weights. See `LayerCollectives.reduce`."""
        gradients = [weight.take_gradient().reshape(-1) for weight in weights]
        # The sum has the dtype of the optimizer's gradient, so it is rounded once at most.
        outputs = [w.flat.new_empty(w.width, dtype=w.shard.dtype) for w in weights]
        pairs = list(zip(weights, gradients, strict=True))
        parts = [[w.part_of(gradient, r) for w, gradient in pairs] for r in range(self._ranks)]
        mine = parts[self._memory.rank]
        means = [output[: len(part)] for output, part in zip(outputs, mine, strict=True)]
        work = self._means.start(parts, means)
        return Reduction(work, gradients, list(zip(weights, outputs, strict=True)))

    def await_readers(self) -> None:
        """Wait until all peers have read what this rank has written. All ranks must call this."""
        self._memory.aside(self._await_gathers, "gather").wait()
        self._means.finish()

    def _await_gathers(self) -> None:
        self._gathers.end()
        self._written.clear()


class _Turns:
    """Pairs of channels, WRITTEN and READ, that gathers use in turns."""

    def __init__(self, memory: PeerMemory, channels: range):
        self._memory, self._pairs = memory, list(zip(channels[::2], channels[1::2], strict=True))
        self._count = 0

    def begin(self) -> tuple[int, int]:
        """Return the channels of the next pair, after all have read its last."""
        turn = self._count % len(self._pairs)
        if self._count >= len(self._pairs):
            self._memory.wait_for_all(self._pairs[turn][1])
        self._count += 1
        return self._pairs[turn]

    def end(self) -> None:
        """Wait until all have read everything. Then the next step, or graph, begins as this one."""
        for _, read in self._pairs[: self._count]:
            self._memory.wait_for_all(read)
        self._count = 0
