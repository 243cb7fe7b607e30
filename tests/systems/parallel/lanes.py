"""Ranks as threads of one process, which take turns in a random or an unfair order.

A rank has lanes, as on a GPU: that of its computation, and those of `PeerMemory.aside`. Only one
lane of all ranks runs at a time. At each signal, wait and function of `aside`, the next one is
chosen among those that can go on. So an order that is right only by luck fails with some seed.
"""

from __future__ import annotations

import random
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from systems.parallel.peer_memory import PeerMemory


class Deadlock(Exception):
    """No lane can go on."""


class Lanes:
    """The lanes of all ranks. `order` chooses the index of the next among those that can go on."""

    def __init__(self, order: Callable[[int], int]):
        self._order = order
        self._changed = threading.Condition()
        self._ready: dict[str, Callable[[], bool]] = {}  # lane -> whether it can go on
        self._turn: str | None = None
        self._failed: BaseException | None = None

    def run(self, ranks: list[Callable[[], None]]) -> None:
        """Run a function for each rank. Raise the first error of any lane."""
        for number in range(len(ranks)):
            self._ready[f"rank {number}"] = lambda: True
        threads = [
            threading.Thread(target=self._lane, args=(f"rank {number}", function), daemon=True)
            for number, function in enumerate(ranks)
        ]
        with self._changed:
            self._next()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failed is not None:
            raise self._failed

    def _lane(self, name: str, function: Callable[[], None]) -> None:
        try:
            self._take(name)
            function()
        except BaseException as error:
            self._failed = self._failed or error
        with self._changed:
            self._ready.pop(name, None)
            self._next()

    def add(self, name: str, function: Callable[[], None], ready: Callable[[], bool]) -> None:
        """Add a lane that runs a function when it is ready."""
        self._ready[name] = ready
        threading.Thread(target=self._lane, args=(name, function), daemon=True).start()

    def until(self, name: str, ready: Callable[[], bool]) -> None:
        """Let another lane run, and return when it is the turn of this one, which is ready then."""
        with self._changed:
            self._ready[name] = ready
            self._next()
        self._take(name)

    def _take(self, name: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._turn == name or self._failed is not None)
            if self._failed is not None:
                raise Deadlock from self._failed

    def _next(self) -> None:
        able = [name for name, ready in sorted(self._ready.items()) if ready()]
        if not able and self._ready:
            self._failed = self._failed or Deadlock(sorted(self._ready))
        self._turn = able[self._order(len(able))] if able else None
        self._changed.notify_all()


class LaneMemory(PeerMemory):
    """Peer memory of a rank among `Lanes`. A signal waits until the one before was seen."""

    channels = 8

    def __init__(self, lanes: Lanes, shared: dict[str, Any], rank: int, ranks: int, nbytes: int):
        self.rank, self.nbytes = rank, nbytes
        self.peers = [(rank + distance) % ranks for distance in range(1, ranks)]
        self._lanes = lanes
        self._signals: Counter[tuple[int, int, int]] = shared.setdefault("signals", Counter())
        self.buffers = shared.setdefault("buffers", [])
        while len(self.buffers) < ranks:  # 255: what nobody wrote is NaN, or large
            self.buffers.append(torch.full((nbytes,), 255, dtype=torch.uint8))
        self._asides: dict[str, deque[int]] = defaultdict(deque)
        self._started = 0

    def _lane(self) -> str:
        return threading.current_thread().name

    def signal(self, channel: int) -> None:
        for peer in self.peers:
            key = self.rank, peer, channel
            self._until_signal_is(key, 0)
            self._signals[key] = 1
            self._lanes.until(self._lane(), lambda: True)  # others may go on first

    def wait(self, peer: int, channel: int) -> None:
        key = peer, self.rank, channel
        self._until_signal_is(key, 1)
        self._signals[key] = 0

    def _until_signal_is(self, key: tuple[int, int, int], value: int) -> None:
        self._lanes.until(self._lane(), lambda: self._signals[key] == value)

    def aside(self, work: Callable[[], None], lane: str = "", after: Any = None) -> Any:
        number, queue = self._started, self._asides[lane]
        self._started += 1
        queue.append(number)
        name = f"aside {self.rank} {number}"

        def run() -> None:
            threading.current_thread().name = name
            if after is not None:
                after.wait()
            with torch.no_grad():
                work()
            queue.remove(number)

        self._lanes.add(name, run, lambda: queue[0] == number)
        return SimpleNamespace(
            wait=lambda: self._lanes.until(self._lane(), lambda: number not in queue)
        )


def orders(count: int) -> list[Callable[[int], int]]:
    """Return orders: the first or the last lane as long as it can go on, and random ones."""
    first: list[Callable[[int], int]] = [lambda _: 0, lambda n: n - 1]
    return first + [random.Random(seed).randrange for seed in range(count)]
