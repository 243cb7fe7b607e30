"""Gather the weights of FSDP's layers, and average their gradients, by reading peers' memory.

It replaces `sharded_weights.LayerCollectives`. A transfer takes these steps in `PeerMemory`:

    1   Every rank writes what the others need into its buffer, and signals WRITTEN: its shards of
        weights, or the others' parts of its gradients, divided by the number of ranks.
    2   Every rank pulls what it needs from its peers, and signals READ.

A part is what one rank has of a tensor. The buffer has a place for the shard of every weight, which
backward pulls again without step 1. It also has a few slots, each for the gradients of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from systems.parallel.peer_memory import PeerMemory, aligned, make_peer_memory
from systems.parallel.pulled_average import write_mean
from systems.parallel.sharded_weights import Reduction, ShardedWeight
from systems.parallel.wrapper import in_backward


class PulledLayers:
    """Transfers of the weights of layers, and of their gradients.

    Args:
        layers: the weights of each layer.
        in_flight: largest number of layers whose gradients are averaged at the same time.
    """

    def __init__(
        self, layers: Sequence[Sequence[ShardedWeight]], in_flight: int, group: dist.ProcessGroup
    ):
        self._ranks, starts, end = group.size(), dict[ShardedWeight, int](), 0
        for weight in dict.fromkeys(weight for layer in layers for weight in layer):
            starts[weight] = end
            end += _part_size([weight])
        part = max(map(_part_size, layers))
        # One more, so that the next layer writes while the others are still read.
        self._slots = [end + i * part * self._ranks for i in range(in_flight + 1)]
        device = next(iter(starts)).shard.device
        end += len(self._slots) * part * self._ranks
        memory = self._memory = make_peer_memory(group, device, end)
        # Places of the shards of all ranks
        self._shards = {
            weight: [_place(buffer[start:], weight) for buffer in memory.buffers]
            for weight, start in starts.items()
        }
        self._written: set[ShardedWeight] = set()  # weights whose places all have not read yet
        slots = range(2 * len(self._slots))
        self._reductions = _Turns(memory, slots)
        self._gathers = _Turns(memory, range(len(slots), memory.channels // 2 * 2))
        # Where gradients arrive, those of a peer in each row
        self._arrived = torch.empty((len(memory.peers), part), dtype=torch.uint8, device=device)

    @torch.no_grad()
    def gather(self, weights: list[ShardedWeight]) -> int:
        """Start to gather those of a layer's weights that are not gathered yet.

        Returns the number of transfers, 0 or 1. See `LayerCollectives.gather`.
        """
        weights = [weight for weight in weights if not weight.gathered]
        if not weights:
            return 0
        for weight in weights:
            weight.allocate()
        pulling = self._memory.aside(partial(self._gather, weights, in_backward()), "gather")
        for weight in weights:
            weight.gathering = pulling
        return 1

    def _gather(self, weights: list[ShardedWeight], again: bool) -> None:
        memory = self._memory
        write = not (again and self._written.issuperset(weights))
        if write and not self._written.isdisjoint(weights):
            self._await_gathers()
        _, written, read = self._gathers.begin()
        if write:
            self._written.update(weights)
            for weight in weights:
                shard = weight.shard.detach().view(-1)
                self._shards[weight][memory.rank][: len(shard)].copy_(shard)
            memory.signal(written)
        for rank in (memory.rank, *memory.peers):
            if write and rank != memory.rank:
                memory.wait(rank, written)
            for weight in weights:
                part = weight.flat.narrow(0, rank * weight.width, weight.width)
                part.copy_(self._shards[weight][rank])
        memory.signal(read)

    @torch.no_grad()
    def reduce(self, weights: list[ShardedWeight]) -> list[Reduction]:
        """Start to average the gradients of unsharded weights. See `LayerCollectives.reduce`."""
        if not weights:
            return []
        gradients = [weight.take_gradient().reshape(-1) for weight in weights]
        # The sum has the dtype of the optimizer's gradient, so it is rounded once at most.
        outputs = [w.flat.new_empty(w.width, dtype=w.shard.dtype) for w in weights]
        work = self._memory.aside(partial(self._reduce, weights, gradients, outputs), "reduce")
        return [Reduction(work, gradients, list(zip(weights, outputs, strict=True)))]

    def _reduce(
        self, weights: list[ShardedWeight], gradients: list[Tensor], outputs: list[Tensor]
    ) -> None:
        memory, me, size = self._memory, self._memory.rank, _part_size(weights)
        turn, written, read = self._reductions.begin()
        starts = [self._slots[turn] + rank * size for rank in range(self._ranks)]
        for rank in memory.peers:
            places = _places(memory.buffers[me][starts[rank] :], weights)
            for weight, gradient, place in zip(weights, gradients, places, strict=True):
                part = weight.part_of(gradient, rank)
                torch.mul(part, 1 / self._ranks, out=place[: len(part)])
        memory.signal(written)
        for peer, row in zip(memory.peers, self._arrived, strict=True):
            memory.wait(peer, written)
            row[:size].copy_(memory.buffers[peer][starts[me] : starts[me] + size])
        arrived = [_places(row, weights) for row in self._arrived]
        for weight, gradient, output, *parts in zip(
            weights, gradients, outputs, *arrived, strict=True
        ):
            mine = weight.part_of(gradient, me)
            count = len(mine)
            write_mean(output[:count], mine, [part[:count] for part in parts])
        memory.signal(read)

    def await_readers(self) -> None:
        """Wait until all peers have read what this rank has written. All ranks must call this."""
        self._memory.aside(self._await_gathers, "gather").wait()
        self._memory.aside(self._reductions.end, "reduce").wait()

    def _await_gathers(self) -> None:
        self._gathers.end()
        self._written.clear()


class _Turns:
    """Pairs of channels, WRITTEN and READ, that transfers in one lane use in turns."""

    def __init__(self, memory: PeerMemory, channels: range):
        self._memory, self._pairs = memory, list(zip(channels[::2], channels[1::2], strict=True))
        self._count = 0

    def begin(self) -> tuple[int, int, int]:
        """Return the number and the channels of the next pair, after all have read its last."""
        turn = self._count % len(self._pairs)
        if self._count >= len(self._pairs):
            self._memory.wait_for_all(self._pairs[turn][1])
        self._count += 1
        return turn, *self._pairs[turn]

    def end(self) -> None:
        """Wait until all have read everything. Then the next step, or graph, begins as this one."""
        for _, read in self._pairs[: self._count]:
            self._memory.wait_for_all(read)
        self._count = 0


def _places(memory: Tensor, weights: Sequence[ShardedWeight]) -> list[Tensor]:
    """Return places in a memory for a part of each weight, side by side."""
    places, start = [], 0
    for weight in weights:
        places.append(_place(memory[start:], weight))
        start += _part_size([weight])
    return places


def _place(memory: Tensor, weight: ShardedWeight) -> Tensor:
    return memory[: weight.width * weight.flat.element_size()].view(weight.flat.dtype)


def _part_size(weights: Sequence[ShardedWeight]) -> int:
    """Return the bytes of the places of a part of each of these weights."""
    return sum(aligned(weight.width * weight.flat.element_size()) for weight in weights)
