"""The order of reads and writes in peer memory, with ranks that run ahead or fall behind.

Ranks are threads of one process. A rank has lanes, as on a GPU: that of its computation, and those
of `PeerMemory.aside`. Only one lane of all ranks runs at a time, and at each signal and wait a
`Schedule` chooses at random which goes on. So an order that is right only by luck fails with some
seed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from systems.parallel import peer_ddp, peer_layers
from systems.parallel.buckets import packed_bytes
from systems.parallel.peer_ddp import PeerBuckets
from systems.parallel.peer_layers import PeerLayers
from systems.parallel.peer_memory import PeerMemory
from systems.parallel.sharded_optimizer import _Chunk
from systems.parallel.sharded_weights import ShardedWeight
from tests.interpreted.hopper_emulator.schedule import Schedule

STEPS = 4
Rank = Callable[[Any, int], None]  # function (group, rank) that all ranks run


class LaneMemory(PeerMemory):
    """Peer memory of a rank. A signal waits until the one before was seen."""

    channels = 8

    def __init__(self, group: Any, size: int, schedule: Schedule, shared: dict[str, Any]):
        self.rank, self.nbytes, self._schedule = group.rank(), size, schedule
        self.peers = [(self.rank + distance) % group.size() for distance in range(1, group.size())]
        self._signals = shared.setdefault("signals", Counter())
        # 255: what nobody wrote is NaN, or large
        new = [torch.full((size,), 255, dtype=torch.uint8) for _ in range(group.size())]
        self.buffers = shared.setdefault("buffers", new)
        self._last: dict[str, Any] = {}  # the latest function of each lane

    def signal(self, channel: int) -> None:
        for peer in self.peers:
            self._set_signal((self.rank, peer, channel), 1)
            self._schedule.switch()

    def wait(self, peer: int, channel: int) -> None:
        self._set_signal((peer, self.rank, channel), 0)

    def _set_signal(self, key: tuple[int, int, int], value: int) -> None:
        self._schedule.switch(lambda: self._signals[key] != value, f"signal {key}")
        self._signals[key] = value

    def aside(self, work: Callable[[], None], lane: str = "", after: Any = None) -> Any:
        earlier = [one for one in (self._last.get(lane), after) if one is not None]

        def run() -> None:
            for one in earlier:
                one.wait()
            with torch.no_grad():
                work()

        agent = self._schedule.start(run)
        done = partial(self._schedule.switch, lambda: agent.is_finished, f"lane {lane}")
        self._last[lane] = SimpleNamespace(wait=done)
        return self._last[lane]


def run(monkeypatch: pytest.MonkeyPatch, ranks: int, seed: int, function: Rank) -> None:
    schedule, shared = Schedule(seed), dict[str, Any]()

    def memory(group: Any, device: Any, nbytes: int) -> LaneMemory:
        return LaneMemory(group, nbytes, schedule, shared)

    monkeypatch.setattr(peer_ddp, "make_peer_memory", memory)
    monkeypatch.setattr(peer_layers, "make_peer_memory", memory)

    def start(rank: int) -> None:
        group = SimpleNamespace(rank=lambda: rank, size=lambda: ranks, memory=memory)
        function(group, rank)

    schedule.run([partial(start, rank) for rank in range(ranks)])


def values(rank: int, step: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-8, 8, shape, generator=generator) * 12.0  # divisible by 2 and 3


rare = [pytest.mark.slow, pytest.mark.depends()]
each_order = pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=rare) for seed in range(6, 12))]
)
each_size = pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=rare)])


@each_size
@each_order
@pytest.mark.parametrize("owners_only", [False, True])
@pytest.mark.parametrize("in_flight", [2, pytest.param(4, marks=rare)])
def test_means_of_buckets(ranks, seed, owners_only, in_flight, monkeypatch):
    monkeypatch.setattr(peer_ddp, "IN_FLIGHT", in_flight)
    parts = [[(3, 5), (7,)], [(2, 2, 2), (1,)], [(9,)], [(4,), (2, 3)], [(5,)]]

    def train(group: Any, rank: int) -> None:
        likes = [[torch.empty(shape) for shape in part] for part in parts]
        flat = [like for part in likes for like in part]
        owners = {like: index % ranks for index, like in enumerate(flat)}
        buckets = PeerBuckets(likes, group, owners if owners_only else None)
        for step in range(STEPS):
            views, given = [], []
            for index, part in enumerate(parts):
                given.append([values(rank, step, *shape) for shape in part])
                views += buckets.start(index, given[-1])
                old = [gradient for part in given[: -peer_ddp.IN_FLIGHT] for gradient in part]
                for gradient, like in zip(old, flat, strict=False):
                    if not owners_only or owners[like] != rank:
                        gradient.fill_(torch.nan)  # its memory may now be used again
            buckets.finish()
            for view, like in zip(views, flat, strict=True):
                assert (view is None) == (owners_only and owners[like] != rank)
                if view is not None:
                    mean = sum(values(r, step, *like.shape) for r in range(ranks)) / ranks
                    torch.testing.assert_close(view, mean)
                    view.zero_()  # as a user may from now on

    run(monkeypatch, ranks, seed, train)


@each_size
@each_order
def test_weights_and_gradients_of_layers(ranks, seed, monkeypatch):
    in_backward: dict[int, bool] = {}
    monkeypatch.setattr(peer_layers, "in_backward", lambda: in_backward[threading.get_ident()])

    def train(group: Any, rank: int) -> None:
        whole = [values(0, 99 + i, 3, 5 + i) for i in range(6)]
        weights = [ShardedWeight(nn.Parameter(x.clone()), [], x.dtype, group) for x in whole]
        layers = [weights[:2], *([weight] for weight in weights[2:])]  # more than places
        exchange = PeerLayers(layers, 2, group)

        def gather(order: Any) -> None:
            for layer in order:
                exchange.gather(layer)
            for weight, x in zip(weights, whole, strict=True):
                weight.wait()
                torch.testing.assert_close(weight.unsharded.detach(), x + added)
                weight.release()

        def add(number: int) -> None:
            for weight in weights:
                weight.shard.data += number

        added = 0
        for step in range(STEPS):
            in_backward[threading.get_ident()] = False
            for _ in range(step % 3):  # passes without backward
                gather(layers)
                exchange.await_readers()
                add(10)
                added += 10
            gather(layers)
            in_backward[threading.get_ident()] = True
            gather(reversed(layers))
            reductions = []
            for layer in reversed(layers):
                for weight in layer:
                    index = weights.index(weight)
                    weight.unsharded.grad = values(rank, 10 * step + index, *weight.shape)
                reductions += exchange.reduce(layer)
                while len(reductions) > 2:
                    reductions.pop(0).finish()
            for reduction in reductions:
                reduction.finish()
            for index, weight in enumerate(weights):
                sums = sum(values(r, 10 * step + index, *weight.shape) for r in range(ranks))
                torch.testing.assert_close(weight.shard.grad, weight.piece_of(sums / ranks))
                weight.shard.grad = None
            exchange.await_readers()
            add(1)
            added += 1

    run(monkeypatch, ranks, seed, train)


@each_size
@each_order
def test_parameters_of_chunks(ranks, seed, monkeypatch):
    def train(group: Any, rank: int) -> None:
        owned = [[torch.zeros(5 + r), torch.zeros(3, 2)] for r in range(ranks)]
        chunks = [_Chunk([[x[i]] for x in owned], None, 0) for i in range(2)]
        nbytes = sum(packed_bytes(tensors) for tensors in owned)
        memory = group.memory(group, None, nbytes)
        start = 0
        for index, chunk in enumerate(chunks):
            start = chunk.place(memory, start, index)
        for step in range(1, STEPS):
            works = []
            for index, chunk in enumerate(chunks):
                owned[rank][index].fill_(step + rank)
                works += chunk.send(group)
            for work in works:
                work.wait()
            for owner, tensors in enumerate(owned):
                assert all(tensor.eq(step + owner).all() for tensor in tensors)

    run(monkeypatch, ranks, seed, train)
