"""The order of reads and writes in peer memory, with ranks that run ahead or fall behind.

Ranks are threads of one process. A rank has lanes, as on a GPU: that of its computation, and those
of `PeerMemory.aside`. A lane knows which operations of all lanes happen before its next one: those
before it in the lane, before an event or before a signal that it has awaited (Lamport 1978, "Time,
Clocks, and the Ordering of Events in a Distributed System"). If two operations use the same memory
and one writes, one must happen before the other. It does not matter which of them a `Schedule` lets
run first, so a single run finds what is right only by luck.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode as current
from torch.utils._pytree import tree_leaves

from systems.parallel import peer_ddp, peer_layers
from systems.parallel.buckets import packed_bytes
from systems.parallel.peer_ddp import PeerBuckets
from systems.parallel.peer_layers import PeerLayers
from systems.parallel.peer_memory import PeerMemory
from systems.parallel.sharded_optimizer import _Chunk
from systems.parallel.sharded_weights import ShardedWeight
from tests.interpreted.hopper_emulator.schedule import Schedule

STEPS = 3
WORD = 4  # bytes
Rank = Callable[[Any, int], None]  # function (group, rank) that all ranks run


class Lane(TorchDispatchMode):
    """A stream of a rank, which notes what its operations read and write.

    `before` has the number of operations of each lane that happen before the next one of this lane:
    by key (lane, True) all, by (lane, False) without signals, of which a CUDA graph does not know.
    """

    def __init__(self, name: str, shared: SimpleNamespace):
        super().__init__()
        self.name, self._shared = name, shared
        self.before = Counter[tuple[str, bool]]()

    def advance(self) -> None:
        self.before.update([(self.name, True), (self.name, False)])

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.advance()
        declared, named = function._schema, kwargs or {}
        if "empty" in declared.name:  # neither reads nor writes
            return function(*args, **named)
        for index, argument in enumerate(declared.arguments):
            value = args[index] if index < len(args) else named.get(argument.name)
            alias = argument.alias_info
            if alias is None or alias.is_write:  # else, the result is a view
                self._use(value, alias is not None, function)
        result = function(*args, **named)
        results = result if len(declared.returns) > 1 else [result]
        for returned, value in zip(declared.returns, results, strict=True):
            if returned.alias_info is None:
                self._use(value, True, function)
        return result

    def _use(self, value: Any, writes: bool, function: Any) -> None:
        """Raise an error if another lane uses the memory of tensors without an order."""
        mine = f"{self.name}: {function}"
        for tensor in tree_leaves(value):
            if not isinstance(tensor, torch.Tensor) or tensor.is_meta or not tensor.numel():
                continue
            last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            start = tensor.data_ptr()
            self._shared.alive.append(tensor.untyped_storage())  # so nothing else has its address
            for at in range(start // WORD, (start + last * tensor.itemsize) // WORD + 1):
                uses = self._shared.uses[at]
                for (lane, wrote), (number, other) in uses.items():
                    if (writes or wrote) and number > self.before[lane, True]:
                        raise AssertionError(f"no order of [{other}] and [{mine}]")
                if writes:
                    uses.clear()
                uses[self.name, writes] = self.before[self.name, True], mine


class LaneMemory(PeerMemory):
    """Peer memory of a rank. A signal waits until the one before was seen, which orders nothing."""

    def __init__(self, group: Any, size: int, shared: SimpleNamespace):
        self.rank, self.nbytes, ranks = group.rank(), size, group.size()
        self.peers = [(self.rank + distance) % ranks for distance in range(1, ranks)]
        self.channels, self._schedule, self._shared = shared.channels, shared.schedule, shared
        # 255: what nobody wrote is NaN, or large
        new = [torch.frombuffer(bytearray([255] * size), dtype=torch.uint8) for _ in range(ranks)]
        self.buffers = shared.buffers = shared.buffers or new
        self._signals: dict[tuple[int, int, int], Counter[Any]] = shared.signals
        self._last = dict[str, Any]()  # the latest function of each lane
        self._step = 0

    def signal(self, channel: int) -> None:
        current().advance()
        for peer in self.peers:
            key = self.rank, peer, channel
            self._schedule.switch(lambda key=key: key not in self._signals, f"no signal {key}")
            before = current().before
            self._signals[key] = Counter({at: before[at] for at in before if at[1]})
            self._schedule.switch()

    def wait(self, peer: int, channel: int) -> None:
        key = peer, self.rank, channel
        self._schedule.switch(lambda: key in self._signals, f"signal {key}")
        current().before |= self._signals.pop(key)
        current().advance()

    def aside(self, work: Callable[[], None], lane: str = "", after: Any = None) -> Any:
        last, before, step = self._last.get(lane), current().before.copy(), self._step
        stream = last.stream if last else Lane(f"rank {self.rank}, lane {lane}", self._shared)

        def run() -> None:
            if last:
                last.end()
            with stream, torch.no_grad():
                if after is None:
                    stream.before |= before
                else:
                    after.wait()
                work()
                task.before = stream.before.copy()

        def wait() -> None:
            assert step == self._step, "a CUDA graph cannot wait for an earlier one"
            task.end()
            current().before |= task.before

        agent = self._schedule.start(run)
        end = partial(self._schedule.switch, lambda: agent.is_finished, f"lane {lane}")
        task = self._last[lane] = SimpleNamespace(end=end, wait=wait, stream=stream)
        return task

    def end_step(self) -> None:
        """Check that a step may be a CUDA graph: the computation waits for all other lanes."""
        for last in self._last.values():
            last.end()
            key = last.stream.name, False
            assert last.before[key] <= current().before[key], f"{key[0]} has not ended"
        self._step += 1


def run(monkeypatch: pytest.MonkeyPatch, ranks: int, function: Rank, channels: int = 8) -> None:
    shared = SimpleNamespace(schedule=Schedule(0), channels=channels, signals={}, buffers=[])
    shared.uses, shared.alive = defaultdict(dict), []

    def memory(group: Any, device: Any, nbytes: int) -> LaneMemory:
        group.made = LaneMemory(group, nbytes, shared)
        return group.made

    monkeypatch.setattr(peer_ddp, "make_peer_memory", memory)
    monkeypatch.setattr(peer_layers, "make_peer_memory", memory)

    def start(rank: int) -> None:
        group = SimpleNamespace(rank=lambda: rank, size=lambda: ranks, memory=memory)
        with Lane(f"rank {rank}", shared):
            function(group, rank)

    shared.schedule.run([partial(start, rank) for rank in range(ranks)])
    assert not shared.signals, "a signal was not awaited"


def test_a_missing_wait_is_found(monkeypatch):
    def use(group: Any, rank: int) -> None:
        group.memory(group, None, 256).buffers[0].fill_(rank)

    with pytest.raises(AssertionError, match="no order of"):
        run(monkeypatch, 2, use)


def values(rank: int, step: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(-8, 8, shape, generator=generator) * 12.0  # divisible by 2, 3 and 4


def either(name: str, *values: int) -> Any:
    """Parametrize a test, whose last value finds the same as the others."""
    last = pytest.param(values[-1], marks=pytest.mark.slow)
    return pytest.mark.parametrize(name, [*values[:-1], last])


each_size = either("ranks", 2, 3, 4)


@each_size
@pytest.mark.parametrize("owners_only", [False, True])
@either("in_flight", 2, 4)
def test_means_of_buckets(ranks, owners_only, in_flight, monkeypatch):
    monkeypatch.setattr(peer_ddp, "IN_FLIGHT", in_flight)
    parts = [[(3, 50), (70,)], [(2, 2, 2), (1,)], [(9,)], [(4,), (2, 3)], [(5,)]]

    def train(group: Any, rank: int) -> None:
        likes = [[torch.empty(shape) for shape in part] for part in parts]
        flat = [like for part in likes for like in part]
        owners = {like: index % ranks for index, like in enumerate(flat)}
        buckets = PeerBuckets(likes, group, owners if owners_only else None)
        views: list[Any] = [[None] * len(part) for part in parts]
        for step in range(STEPS):
            unused = []
            for index, part in enumerate(parts):
                given = [values(rank, step, *shape) for shape in part]
                if step % 2:  # in place, as gradients are accumulated
                    pairs = zip(given, views[index], strict=True)
                    given = [x if view is None else view.copy_(x) for x, view in pairs]
                views[index] = buckets.start(index, given)
                pairs = zip(given, views[index], strict=True)
                unused.append([x for x, y in pairs if y is None or x.data_ptr() != y.data_ptr()])
                for gradient in unused[index - in_flight] if index >= in_flight else ():
                    gradient.fill_(torch.nan)  # its memory may now be used again
            buckets.finish()
            for gradient in chain(*unused):
                gradient.fill_(torch.nan)
            for view, like in zip(chain(*views), flat, strict=True):
                assert (view is None) == (owners_only and owners[like] != rank)
                if view is not None:
                    mean = sum(values(r, step, *like.shape) for r in range(ranks)) / ranks
                    assert torch.equal(view, mean)
                    view.zero_()  # as a user may from now on
            group.made.end_step()

    run(monkeypatch, ranks, train)


class Weight(ShardedWeight):
    """A weight whose memory is not freed, but overwritten, as by what uses the memory next."""

    gathered = False

    def allocate(self) -> None:
        self.gathered = True

    def release(self) -> None:
        self.wait()
        self.flat.fill_(torch.nan)
        self.gathered = False


@each_size
@either("channels", 8, 50)  # for fewer gathers than in a step, and for more
def test_weights_and_gradients_of_layers(ranks, channels, monkeypatch):
    monkeypatch.setattr(peer_layers, "in_backward", lambda: current().in_backward)

    def train(group: Any, rank: int) -> None:
        whole = [values(0, 99 + i, 3, 5 + i) for i in range(6)]
        weights = [Weight(nn.Parameter(x.clone()), [], x.dtype, group) for x in whole]
        for weight in weights:
            ShardedWeight.allocate(weight)
        layers = [weights[:2], *([weight] for weight in weights[2:])]  # more than places
        exchange = PeerLayers(layers, 2, group)
        added = 0

        def gather(order: Any, backward: bool = False) -> None:
            current().in_backward = backward
            for layer in order:
                exchange.gather(layer)
            for weight, x in zip(weights, whole, strict=True):
                if weight.gathered:
                    weight.wait()
                    assert torch.equal(weight.unsharded.detach(), x + added)
                    weight.release()

        def add(number: int) -> None:
            nonlocal added
            for weight in weights:
                weight.shard.data += number
            added += number

        for step in range(STEPS):
            for part in ([weights[:1]], layers[:1], layers[::-1]):  # on their own, not by a model
                gather(part)
                add(10)
            exchange.await_readers()
            gather([weights[:1]])
            gather(layers, backward=True)  # of a forward before the last change
            exchange.await_readers()
            add(10)
            gather(layers)
            gather(layers[::-1], backward=True)
            reductions = []
            for layer in reversed(layers):
                for weight in layer:
                    index = weights.index(weight)
                    weight.unsharded.grad = values(rank, 10 * step + index, *weight.shape)
                reductions.append(exchange.reduce(layer))
                while len(reductions) > 2:
                    reductions.pop(0).finish()
            for reduction in reductions:
                reduction.finish()
            for index, weight in enumerate(weights):
                sums = sum(values(r, 10 * step + index, *weight.shape) for r in range(ranks))
                assert torch.equal(weight.shard.grad, weight.piece_of(sums / ranks))
                weight.shard.grad = None
            exchange.await_readers()
            add(1)
            group.made.end_step()

    run(monkeypatch, ranks, train, channels)


@each_size
def test_parameters_of_chunks(ranks, monkeypatch):
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
            memory.end_step()

    run(monkeypatch, ranks, train)
