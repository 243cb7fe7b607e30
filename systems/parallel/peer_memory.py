"""Memory of the ranks of one host that all of them can access, and signals between these ranks.

Every rank has a buffer of the same size. It may read and write those of the others, its peers, too.
Signals order this: a rank tells its peers that it has written something, or that it has read it.

On GPUs, a buffer is symmetric memory of torch, and copy engines copy over NVLink. On CPUs, a buffer
is a file in shared memory.
"""

from __future__ import annotations

import os
import tempfile
import warnings
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store
from torch.profiler import record_function

SHARED_FOLDER = Path("/dev/shm")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # equal for all processes of a host
MAX_CHANNELS = 1024
_LIVE: weakref.WeakSet[DeviceMemory] = weakref.WeakSet()


class Aside(Protocol):
    """Work beside the computation, see `PeerMemory.aside`."""

    def wait(self) -> None:
        """Wait until the work is done; on a GPU, the current stream waits."""


class PeerMemory:
    """Buffers of all ranks of a group, and signals between them.

    All ranks must make the same objects in the same order. A rank awaits the signals of a peer in a
    channel in the order in which they were sent.

    Args:
        group: its ranks must be able to share memory, see `can_have_peer_memory`.
        nbytes: size of each buffer.

    Raises:
        RuntimeError: on all ranks, if one of them cannot allocate its buffer.

    Attributes:
        buffers: uint8 (nbytes,), those of all ranks, in rank order.
        channels: number of channels of signals.
    """

    buffers: list[Tensor]
    channels: int

    def __init__(self, group: dist.ProcessGroup, device: torch.device, nbytes: int):
        self.rank, self.nbytes = group.rank(), nbytes
        ranks = group.size()
        # In this order, every rank accesses another one at the same time.
        self.peers = [(self.rank + distance) % ranks for distance in range(1, ranks)]
        self._make(group, device)

    def _make(self, group: dist.ProcessGroup, device: torch.device) -> None:
        raise NotImplementedError

    def signal(self, channel: int) -> None:
        """Tell all peers that what this rank did before is done.

        On a GPU, the current stream waits until the peers have seen the one before in this channel.
        """
        raise NotImplementedError

    def wait(self, peer: int, channel: int) -> None:
        """Wait for the next signal of a peer in a channel; on a GPU, the current stream waits."""
        raise NotImplementedError

    def wait_for_all(self, channel: int) -> None:
        """Wait for the next signal of every peer in a channel."""
        for peer in self.peers:
            self.wait(peer, channel)

    def aside(self, work: Callable[[], None], lane: str = "", after: Aside | None = None) -> Aside:
        """Run a function beside the computation of this rank, after those before in the same lane.

        On a GPU, a lane is a stream. It runs the operations of the function after those of `after`,
        or if that is None, after those that are in the current stream now. A CUDA graph cannot wait
        for an event from outside of it, so `after` must be of the same step. On a CPU, functions
        run when somebody waits for them, in order.
        """
        raise NotImplementedError


class HostMemory(PeerMemory):
    """Buffers in files that the ranks of a host share, with signals over torch's store."""

    def _make(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._store = _get_default_store()
        self._counts: Counter[tuple[int, int, int]] = Counter()
        self._queue: deque[Callable[[], None]] = deque()
        self._done = 0  # number of functions of `aside` that have run
        self.channels = MAX_CHANNELS
        self._timeout = group._get_backend(device).options._timeout
        paths: list[Any] = [None] * group.size()
        path, problem = self._make_file()
        try:
            dist.all_gather_object(paths, path, group=group)
            if problem is None and not all(map(os.path.exists, paths)):
                problem = f"ranks do not share the folder {SHARED_FOLDER}"
            _raise_together(problem, group)
            self._name = paths[0]
            self.buffers = [
                torch.from_file(path, shared=True, size=self.nbytes, dtype=torch.uint8)
                for path in paths
            ]
            dist.barrier(group)
        finally:  # The memory lives as long as a process uses it.
            os.unlink(path)

    def _make_file(self) -> tuple[str, str | None]:
        """Return the path of a new file for this rank, and why it is not as large as it must be."""
        folder = SHARED_FOLDER if SHARED_FOLDER.is_dir() else None
        descriptor, path = tempfile.mkstemp(prefix="peer_memory_", dir=folder)
        try:
            os.posix_fallocate(descriptor, 0, max(1, self.nbytes))  # an error now, no SIGBUS later
        except OSError as error:
            return path, f"rank {self.rank} needs {self.nbytes} bytes for {path}: {error.strerror}"
        finally:
            os.close(descriptor)
        return path, None

    def signal(self, channel: int) -> None:
        for peer in self.peers:
            self._store.set(self._key(self.rank, peer, channel), "")

    def wait(self, peer: int, channel: int) -> None:
        key = self._key(peer, self.rank, channel)
        try:
            self._store.wait([key], self._timeout)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank} waits for rank {peer}, which sent no signal within the timeout"
            ) from error
        self._store.delete_key(key)

    def _key(self, source: int, target: int, channel: int) -> str:
        self._counts[source, target, channel] += 1
        number = self._counts[source, target, channel]
        return f"{self._name}/{source}/{target}/{channel}/{number}"

    def aside(self, work: Callable[[], None], lane: str = "", after: Aside | None = None) -> Aside:
        self._queue.append(work)
        return _Queued(self, self._done + len(self._queue))

    def run_until(self, count: int) -> None:
        while self._done < count:
            self._done += 1
            with record_function("peer_copy:"):
                self._queue.popleft()()


class _Queued:
    """The first `count` functions that were given to `HostMemory.aside`."""

    def __init__(self, memory: HostMemory, count: int):
        self._memory, self._count = memory, count

    def wait(self) -> None:
        self._memory.run_until(self._count)


class DeviceMemory(PeerMemory):
    """Buffers in the symmetric memory of torch, with signals that kernels send and await.

    A kernel that waits longer than the timeout of the group prints both ranks and ends the process
    with a CUDA error.
    """

    def _make(self, group: dist.ProcessGroup, device: torch.device) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed import _symmetric_memory as symmetric

        # Unlike `symmetric.empty` of new versions, this has an allocation, and signals, of its own.
        empty = _SymmetricMemory.empty_strided_p2p
        problem = None
        try:
            mine = empty((self.nbytes,), (1,), torch.uint8, device)
        except RuntimeError as error:
            problem = f"rank {self.rank} needs {self.nbytes} bytes of symmetric memory: {error}"
        _raise_together(problem, group)
        self._handle = symmetric.rendezvous(mine, group)
        self.buffers = [
            mine if rank == self.rank
            else self._handle.get_buffer(rank, (self.nbytes,), torch.uint8)
            for rank in range(group.size())
        ]  # fmt: skip
        timeout = group._get_backend(device).options._timeout
        self._timeout_ms = int(timeout.total_seconds() * 1000)
        # A signal is an int32 for each channel and peer.
        self.channels = min(MAX_CHANNELS, self._handle.signal_pad_size // (4 * group.size()))
        self._lanes: dict[str, torch.cuda.Stream] = defaultdict(partial(torch.cuda.Stream, device))
        _LIVE.add(self)

    def signal(self, channel: int) -> None:
        for peer in self.peers:
            self._handle.put_signal(peer, channel, self._timeout_ms)

    def wait(self, peer: int, channel: int) -> None:
        self._handle.wait_signal(peer, channel, self._timeout_ms)

    def aside(self, work: Callable[[], None], lane: str = "", after: Aside | None = None) -> Aside:
        stream = self._lanes[lane]
        if after is None:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            if after is not None:
                after.wait()
            work()
            event = torch.cuda.Event()
            event.record()
        return event


def make_peer_memory(group: dist.ProcessGroup, device: torch.device, nbytes: int) -> PeerMemory:
    """Return the peer memory for a kind of device. See `PeerMemory`."""
    return (DeviceMemory if device.type == "cuda" else HostMemory)(group, device, nbytes)


def live_bytes() -> int:
    """Return the bytes of this rank's buffers on GPUs, which torch's allocator does not count."""
    return sum(memory.nbytes for memory in _LIVE)


def can_have_peer_memory(group: dist.ProcessGroup, devices: set[torch.device]) -> bool:
    """Return whether the ranks of a group can have peer memory. Warn if not.

    All ranks must call it. `devices` are those of the tensors to copy.
    """
    reason = "tensors are on several devices"
    if len(devices) == 1:
        reason = reason_against(group, *devices) or ""
    if reason:
        warnings.warn(f"the ranks use collectives instead of peer memory: {reason}", stacklevel=2)
    return not reason


def reason_against(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Return why the ranks of a group cannot have peer memory, or None. All ranks must call it."""
    if group.size() == 1:
        return "there is only one rank"
    host = BOOT_ID.read_text() if BOOT_ID.exists() else os.uname().nodename
    gpu, reached = None, set[str]()
    if device.type == "cuda":
        gpu = _uuid(device.index)
        reached = {
            _uuid(index)
            for index in range(torch.cuda.device_count())
            if index == device.index or torch.cuda.can_device_access_peer(device.index, index)
        }
    ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(ranks, (host, gpu, reached), group=group)
    if len({host for host, _, _ in ranks}) > 1:
        return "the ranks are on several hosts"
    if gpu is not None and any(other not in reach for _, other, _ in ranks for *_, reach in ranks):
        return "a GPU cannot access the memory of the others, or see them"
    return None


def _raise_together(problem: str | None, group: dist.ProcessGroup) -> None:
    """Raise an error on all ranks if any has a problem. All ranks must call this function."""
    problems: list[Any] = [None] * group.size()
    dist.all_gather_object(problems, problem, group=group)
    if any(problems):
        raise RuntimeError(next(filter(None, problems)))


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)
