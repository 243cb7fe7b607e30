"""Substitutes for the functions of `triton.experimental.gluon.language.nvidia.hopper`.

Copies by TMA and WGMMAs are asynchronous operations, see the module `schedule`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tests.interpreted.hopper_emulator.schedule import active, complete_except_last
from tests.interpreted.hopper_emulator.shared_memory import (
    BARRIER_LAYOUT,
    Barrier,
    Descriptor,
    SharedTile,
)
from tests.interpreted.hopper_emulator.values import Tile

WRITE_SLOWNESS = 1000.0  # so that writes to global memory are often later than the reads


def fence_async_shared() -> None:
    """Make the stores of this agent visible to TMA and WGMMA."""
    agent = active().running
    for publish in agent.unfenced:
        publish()
    agent.unfenced.clear()


# ---- mbarriers -----------------------------------------------------------------------------------


def MBarrierLayout() -> object:
    return BARRIER_LAYOUT


def init(barrier: Barrier, count: int) -> None:
    """Let each phase of an mbarrier wait for `count` arrivals."""
    barrier.init(count)

    def publish() -> None:
        barrier.is_fenced = True

    active().running.unfenced.append(publish)


def expect(barrier: Barrier, n_bytes: int, pred: bool = True) -> None:
    """Arrive, and let the phase also wait until TMA has written n_bytes."""
    active().switch()
    if pred:
        barrier.arrive(1, n_bytes)


def arrive(barrier: Barrier, count: int = 1, pred: bool = True) -> None:
    """Arrive `count` times."""
    active().switch()
    if pred:
        barrier.arrive(count)


def wait(barrier: Barrier, phase: int, pred: bool = True) -> None:
    """Wait until the phase of this parity is complete."""
    parity = int(phase)
    assert parity in (0, 1)
    if pred:
        active().switch(lambda: barrier.has_completed(parity), f"phase {parity} of an mbarrier")


# ---- TMA -----------------------------------------------------------------------------------------


def async_load(desc: Descriptor, coord: Sequence[int], barrier: Barrier, tile: SharedTile) -> None:
    """Start to copy the tile of a tensor at `coord` to shared memory."""
    schedule = active()
    schedule.switch()
    assert tile.shape == desc.block_type.shape and tile.dtype == desc.dtype
    coord = [int(x) for x in coord]
    tile.invalidate()

    def load() -> None:
        tile.write(desc.read(coord))
        barrier.receive(desc.block_type.nbytes)

    schedule.detached.append(schedule.operation(load))


def async_store(desc: Descriptor, coord: Sequence[int], tile: SharedTile) -> None:
    """Start to copy a tile in shared memory to a tensor at `coord`."""
    _copy_to_global(desc, coord, tile, adds=False)


def async_atomic_add(desc: Descriptor, coord: Sequence[int], tile: SharedTile) -> None:
    """Start to add a tile in shared memory to a tensor at `coord`."""
    _copy_to_global(desc, coord, tile, adds=True)


def _copy_to_global(desc: Descriptor, coord: Sequence[int], tile: SharedTile, adds: bool) -> None:
    schedule = active()
    schedule.switch()
    assert tile.dtype == desc.dtype
    coord = [int(x) for x in coord]
    data: list[Tensor] = []

    def read() -> None:
        data.append(tile.read().reshape(desc.block_type.shape))

    def write() -> None:
        reading.complete()
        desc.write(coord, data[0], adds)

    reading = schedule.operation(read)
    writing = schedule.operation(write, WRITE_SLOWNESS)
    schedule.running.reads.append(reading)
    schedule.running.writes.append(writing)
    schedule.detached.append(writing)


def store_wait(pendings: int) -> None:
    """Wait until TMA has read shared memory for all copies of this agent except the last ones."""
    active().switch()
    complete_except_last(active().running.reads, pendings)


def wait_until_written(pendings: int) -> None:
    """Wait until all copies of this agent except the last ones have changed global memory."""
    store_wait(pendings)
    complete_except_last(active().running.writes, pendings)


# ---- WGMMA ---------------------------------------------------------------------------------------


def warpgroup_mma(
    a: Tile | SharedTile, b: SharedTile, acc: Tile, use_acc: bool = True, is_async: bool = False
) -> Tile:
    """Start to compute acc + a b, or a b if use_acc is False.

    Args:
        a: 16-bit (m, k), in registers or in shared memory.
        b: 16-bit (k, n).
        acc: float32 (m, n).

    Returns:
        float32 (m, n), to be used after a wait.
    """
    schedule = active()
    schedule.switch()
    assert is_async
    rows, inner = a.shape
    assert rows % 64 == 0 and inner % 16 == 0 and b.shape == [inner, acc.shape[1]]
    assert a.shape[0] == acc.shape[0] and a.dtype == b.dtype and b.dtype.torch.itemsize == 2
    in_registers = a.data if isinstance(a, Tile) else None
    result = Tile(None, acc.shape)

    def multiply() -> None:
        left = a.read() if isinstance(a, SharedTile) else in_registers
        assert left is not None
        result.raw = left.float() @ b.read().float()
        if use_acc:
            assert acc.raw is not None  # the WGMMAs of an agent are executed in order
            result.raw += acc.raw

    result.operation = schedule.operation(multiply)
    schedule.running.wgmmas.append(result.operation)
    return result


def warpgroup_mma_wait(pendings: int, deps: Sequence[Tile]) -> Any:
    """Wait until all WGMMAs of this agent except the last `pendings` are done, and return deps."""
    active().switch()
    complete_except_last(active().running.wgmmas, pendings)
    returned = []
    for tile in deps:
        is_done = tile.operation is not None and tile.operation.is_done
        returned.append(Tile(tile.raw, tile.shape) if is_done else tile)
    return returned[0] if len(returned) == 1 else tuple(returned)


mbarrier = tma = sys.modules[__name__]  # whose functions are above
