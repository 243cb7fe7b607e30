"""Substitutes for the functions of `triton.experimental.gluon.language.nvidia.hopper`.

Copies by TMA and WGMMAs are asynchronous operations, see the module `schedule`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from tests.interpreted.hopper_emulator.schedule import active, complete_but
from tests.interpreted.hopper_emulator.shared_memory import (
    Barrier,
    Barriers,
    Descriptor,
    SharedTile,
)
from tests.interpreted.hopper_emulator.values import Tile


def fence_async_shared() -> None:
    """Make the stores of this agent visible to TMA and WGMMA."""
    agent = active().agent()
    for publish in agent.unfenced:
        publish()
    agent.unfenced.clear()


# ---- mbarriers -----------------------------------------------------------------------------------


def init(barrier: Barrier, count: int) -> None:
    barrier.init(count)


def expect(barrier: Barrier, n_bytes: int, pred: bool = True) -> None:
    active().switch()
    if pred:
        barrier.arrive(1, n_bytes)


def arrive(barrier: Barrier, count: int = 1, pred: bool = True) -> None:
    active().switch()
    if pred:
        barrier.arrive(count)


def wait(barrier: Barrier, phase: int, pred: bool = True) -> None:
    parity = int(phase)
    assert parity in (0, 1)
    if pred:
        active().switch(lambda: barrier.has_completed(parity), f"phase {parity} of an mbarrier")


# ---- TMA -----------------------------------------------------------------------------------------


def async_copy_global_to_shared(
    desc: Descriptor, coord: Sequence[int], barrier: Barrier, tile: SharedTile
) -> None:
    schedule = active()
    assert tile.shape == desc.block_type.shape and tile.dtype == desc.dtype
    coord = [int(x) for x in coord]
    tile.invalidate()

    def execute() -> None:
        tile.write(desc.read(coord))
        barrier.receive(desc.block_type.nbytes)

    schedule.loads.append(schedule.operation(execute))
    schedule.switch()


def async_copy_shared_to_global(desc: Descriptor, coord: Sequence[int], tile: SharedTile) -> None:
    _copy_to_global(desc, coord, tile, adds=False)


def _copy_to_global(desc: Descriptor, coord: Sequence[int], tile: SharedTile, adds: bool) -> None:
    schedule = active()
    assert tile.dtype == desc.dtype
    coord = [int(x) for x in coord]

    def execute() -> None:
        desc.write(coord, tile.read().reshape(desc.block_type.shape), adds)

    schedule.agent().copies.append(schedule.operation(execute))
    schedule.switch()


def wait_for_copies(pendings: int) -> None:
    """Wait until all copies to global memory of this agent except the last `pendings` are done."""
    active().switch()
    complete_but(active().agent().copies, pendings)


class Semantic:
    """Substitute for the object with which a `builtin` function of Gluon generates code."""

    def __init__(self) -> None:
        self.builder = SimpleNamespace(create_async_tma_reduce=self._reduce)

    def _convert_to_ir_values(self, values: Sequence[int], require_i64: bool) -> Sequence[int]:
        return values

    def _reduce(self, kind: str, desc: Descriptor, coord: Sequence[int], tile: SharedTile) -> None:
        assert kind == "add"
        _copy_to_global(desc, coord, tile, adds=True)


# ---- WGMMA ---------------------------------------------------------------------------------------


def warpgroup_mma(
    a: Tile | SharedTile, b: SharedTile, acc: Tile, use_acc: bool = True, is_async: bool = False
) -> Tile:
    """Start to compute acc + a b, or a b if use_acc is False, in float32."""
    schedule = active()
    schedule.switch()
    assert is_async
    rows, inner = a.shape
    assert rows % 64 == 0 and inner % 16 == 0 and b.shape == [inner, acc.shape[1]]
    assert a.shape[0] == acc.shape[0] and a.dtype == b.dtype and b.dtype.torch.itemsize == 2
    result = Tile(None, acc.shape)

    def execute() -> None:
        left = a.data if isinstance(a, Tile) else a.read()
        result.raw = left.float() @ b.read().float()
        if use_acc:
            assert acc.raw is not None  # the WGMMAs of an agent are executed in order
            result.raw += acc.raw

    result.operation = schedule.operation(execute)
    schedule.agent().wgmmas.append(result.operation)
    return result


def warpgroup_mma_wait(pendings: int, deps: Sequence[Tile]) -> Any:
    """Wait until all WGMMAs of this agent except the last `pendings` are done, and return deps."""
    active().switch()
    complete_but(active().agent().wgmmas, pendings)
    returned = []
    for tile in deps:
        is_done = tile.operation is not None and tile.operation.is_done
        returned.append(Tile(tile.raw, tile.shape) if is_done else tile)
    return returned[0] if len(returned) == 1 else tuple(returned)


def namespace() -> SimpleNamespace:
    """Return a substitute for the module."""
    return SimpleNamespace(
        fence_async_shared=fence_async_shared,
        mbarrier=SimpleNamespace(
            MBarrierLayout=lambda: Barriers, init=init, expect=expect, arrive=arrive, wait=wait
        ),
        tma=SimpleNamespace(
            async_copy_global_to_shared=async_copy_global_to_shared,
            async_copy_shared_to_global=async_copy_shared_to_global,
            store_wait=wait_for_copies,
        ),
        warpgroup_mma=warpgroup_mma,
        warpgroup_mma_wait=warpgroup_mma_wait,
    )
