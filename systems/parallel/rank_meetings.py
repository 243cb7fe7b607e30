"""Let ranks agree outside their collectives, over the key-value store of the process group.

Ranks that call different collectives hang, or mix tensors that do not belong together. The store
still works then, so it can tell which rank does something else, and what.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NoReturn, cast

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store, _get_default_store

PATIENCE_S = 5.0  # time until a rank that waits for others says so, in seconds


class Meetings:
    """Points that all ranks of a group must reach.

    Args:
        name: the same on all ranks, and different for each object.
    """

    def __init__(self, name: str):
        self.name = name
        self._count = 0  # number of meetings so far
        self._posted: list[str] = []  # keys of this rank that no rank will need after a meeting

    def meet(self, group: dist.ProcessGroup, what: str) -> None:
        """Wait until all ranks call this function, for the same purpose.

        Raises:
            RuntimeError: if the purposes of the ranks differ, or if a rank has not come when the
                timeout of the process group expires. The message names the ranks. A warning names
                the ranks that are missing after 5 s.
        """
        store = _get_default_store()
        keys = [f"{self._key(group, self._count)}/{rank}" for rank in range(group.size())]
        self._count += 1
        store.set(keys[group.rank()], what)
        self._wait(store, keys, what, group.rank())
        words = [store.get(key).decode() for key in keys]
        for old in self._posted:
            store.delete_key(old)
        self._posted = [keys[group.rank()]]
        if len(set(words)) > 1:
            _refuse(words)

    def post(self, group: dist.ProcessGroup, place: str, value: str) -> None:
        """Tell the other ranks a value without waiting for them.

        Raises:
            RuntimeError: if the first rank that posted at this place had another value.
        """
        store, rank = _get_default_store(), group.rank()
        key = self._key(group, place)
        self._posted.append(key)
        first = store.compare_set(key, "", f"{rank} {value}").decode()
        there, theirs = first.split(" ", 1)
        if theirs != value:
            raise RuntimeError(
                f"ranks must do the same, but rank {rank} is at '{value}' and rank {there} at "
                f"'{theirs}'"
            )

    def _key(self, group: dist.ProcessGroup, place: object) -> str:
        return f"systems/{group.group_name}/{self.name}/{place}"

    def _wait(self, store: Store, keys: list[str], what: str, rank: int) -> None:
        try:
            store.wait(keys, timedelta(seconds=PATIENCE_S))
            return
        except RuntimeError:  # the message of the store says only that the time is over
            missing = [other for other, key in enumerate(keys) if not store.check([key])]
        words = f"rank {rank} waits in '{what}' for ranks {missing}; all ranks must get there"
        warnings.warn(words, stacklevel=4)
        timeout = cast(Any, store).timeout
        try:
            store.wait(keys, timeout)
        except RuntimeError as error:
            raise RuntimeError(f"{words}, and they did not in {timeout}") from error


class LayerOrder:
    """Checks that all ranks run the same layers in the same order, in each pass of a kind.

    A pass is a forward, or a backward with the gradients that it reduces. A rank that runs
    the layers of its previous pass again does not communicate. A rank that runs another layer waits
    until all ranks say that they run this layer now. For the rest of the pass, and for the whole
    first pass, each layer takes one message to the store, some 0.1 ms on one machine.

    Args:
        names: for messages, of everything that may be visited.
    """

    def __init__(self, meetings: Meetings, kind: str, names: Mapping[Any, str]):
        self._meetings, self._kind, self._names = meetings, kind, names
        self._passes = 0  # that have ended
        self.expected: list[Any] = []  # layers of the previous pass
        self.visited: list[Any] = []  # layers of this pass
        self._known = True  # all ranks know that this pass differs from the previous one

    def begin(self) -> None:
        self._known = self._passes == 0
        self.visited = []

    def visit(self, group: dist.ProcessGroup, layer: Any) -> None:
        """Check the next layer of the pass, a key of `names`.

        Raises:
            RuntimeError: if another rank runs another layer; the message names both.
        """
        at = len(self.visited)
        self.visited.append(layer)
        if self._known or self.expected[at : at + 1] != [layer]:
            self._tell(group, at, self._names[layer])

    def end(self, group: dist.ProcessGroup) -> None:
        """Check that no rank runs a further layer in this pass.

        Raises:
            RuntimeError: if a rank does; the message names the rank and the layer.
        """
        at = len(self.visited)
        if self._known or at < len(self.expected):
            self._tell(group, at, "the end")
        self._passes += 1
        self.expected = list(self.visited)

    def _tell(self, group: dist.ProcessGroup, at: int, step: str) -> None:
        if self._known:
            self._meetings.post(
                group, f"{self._kind}{self._passes}/{at}", f"{step} of {self._kind}"
            )
            return
        self._known = True
        usual = self._names[self.expected[at]] if at < len(self.expected) else "the end"
        self._meetings.meet(group, f"{step} of {self._kind}, which was {usual} before")


def _refuse(words: list[str]) -> NoReturn:
    by_rank = (f"rank {rank} is at '{word}'" for rank, word in enumerate(words))
    raise RuntimeError(f"ranks must do the same, but {', '.join(by_rank)}")
