"""Tiles in shared memory, mbarriers, and TMA descriptors of tensors in global memory."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.interpreted.hopper_emulator.schedule import active
from tests.interpreted.hopper_emulator.values import DTYPES, DType, Tile

NAN_BYTE = 0xFF  # floating-point numbers of such bytes are NaN
ALL_COLUMNS = 1 << 30  # more columns than a tile has
BARRIER_LAYOUT = object()  # stands for Gluon's layout of mbarriers


@lru_cache(maxsize=256)
def element_numbers(shape: tuple[int, ...], chunk: int) -> Tensor:
    """Return the number of each element of a tile in the order of addresses, int64, of this shape.

    In a swizzled layout, each `chunk` columns of a tile are contiguous. The swizzle itself, which
    permutes elements within 1 KiB, is not emulated.
    """
    *leading, rows, columns = (1, *shape) if len(shape) == 1 else shape
    chunk = min(chunk, columns)
    blocks = torch.arange(math.prod(shape)).view(*leading, columns // chunk, rows, chunk)
    return blocks.movedim(-3, -2).reshape(shape)


class Allocation:
    """Bytes in shared memory, as threads see them, and as TMA and WGMMA see them."""

    def __init__(self, size: int):
        self.seen_by_threads = torch.full((size,), NAN_BYTE, dtype=torch.uint8)
        self.seen_by_async = self.seen_by_threads.clone()


class SharedTile:
    """A view of shared memory.

    Args:
        allocation: bytes that contain it.
        elements: for each element, its number in the allocation, counted in elements of this dtype.
    """

    def __init__(self, allocation: Allocation, elements: Tensor, dtype: DType):
        self.allocation, self.elements, self.dtype = allocation, elements, dtype

    @property
    def shape(self) -> list[int]:
        return list(self.elements.shape)

    def _view(self, elements: Tensor) -> SharedTile:
        return SharedTile(self.allocation, elements, self.dtype)

    def index(self, i: int) -> SharedTile:
        assert 0 <= i < len(self.elements)
        return self._view(self.elements[i])

    def slice(self, start: int, length: int, dim: int) -> SharedTile:
        return self._view(self.elements.narrow(dim, start, length))

    def permute(self, order: Sequence[int]) -> SharedTile:
        return self._view(self.elements.permute(tuple(order)))

    def reshape(self, shape: Sequence[int]) -> SharedTile:
        return self._view(self.elements.reshape(tuple(shape)))

    def reinterpret(self, dtype: DType, shape: Sequence[int], layout: Any) -> SharedTile:
        """Return a tile of another dtype and shape that has the same bytes."""
        size = math.prod(shape) * dtype.torch.itemsize
        assert size == self.elements.numel() * self.dtype.torch.itemsize  # as Triton 3.8 demands
        start = int(self.elements.min()) * self.dtype.torch.itemsize
        assert start % dtype.torch.itemsize == 0
        elements = element_numbers(tuple(shape), contiguous_columns(layout, dtype))
        return SharedTile(self.allocation, elements + start // dtype.torch.itemsize, dtype)

    def load(self, layout: Any = None) -> Tile:
        """Return the elements as threads see them."""
        active().switch()
        return Tile.of(self._typed(self.allocation.seen_by_threads)[self.elements])

    def store(self, value: Tile) -> None:
        """Store a tile by the threads of a warpgroup.

        Until the next fence, TMA and WGMMA see NaN, since they may see the new or the old data.
        """
        active().switch()
        data = value.data.broadcast_to(self.elements.shape)
        assert data.dtype == self.dtype.torch, f"{data.dtype} is stored as {self.dtype.torch}"
        self._typed(self.allocation.seen_by_threads)[self.elements] = data
        self._set_to_nan(self.allocation.seen_by_async)

        def publish() -> None:
            self._typed(self.allocation.seen_by_async)[self.elements] = data

        active().running.unfenced.append(publish)

    def read(self) -> Tensor:
        """Return the elements as TMA and WGMMA see them."""
        return self._typed(self.allocation.seen_by_async)[self.elements]

    def write(self, data: Tensor) -> None:
        """Write the elements by TMA."""
        for seen in (self.allocation.seen_by_threads, self.allocation.seen_by_async):
            self._typed(seen)[self.elements] = data

    def invalidate(self) -> None:
        """Set the elements to NaN."""
        for seen in (self.allocation.seen_by_threads, self.allocation.seen_by_async):
            self._set_to_nan(seen)

    def _set_to_nan(self, seen: Tensor) -> None:
        seen.view(-1, self.dtype.torch.itemsize)[self.elements.flatten()] = NAN_BYTE

    def _typed(self, seen: Tensor) -> Tensor:
        return seen.view(self.dtype.torch)


def contiguous_columns(layout: Any, dtype: DType) -> int:
    """Return how many columns of a tile are contiguous in a layout, all if it is not swizzled."""
    swizzle = getattr(layout, "swizzle_byte_width", 0)
    return swizzle // dtype.torch.itemsize if swizzle else ALL_COLUMNS


def allocate(dtype: DType, shape: Sequence[int], layout: Any) -> SharedTile | Barriers:
    """Return a tile whose elements are NaN, or an array of mbarriers of the shape (n, 1)."""
    if layout is BARRIER_LAYOUT:
        return Barriers(shape[0])
    size = math.prod(shape) * dtype.torch.itemsize
    elements = element_numbers(tuple(shape), contiguous_columns(layout, dtype))
    return SharedTile(Allocation(size), elements, dtype)


class Barrier:
    """An mbarrier. A phase completes when all arrivals and all bytes of the phase have come."""

    def __init__(self) -> None:
        self.count = 0  # arrivals of each phase; 0 before it is initialized
        self.is_fenced = False  # whether TMA sees the initialization
        self.completed = 0  # number of completed phases
        self.missing = 0  # arrivals that the present phase still needs
        self.bytes = 0  # bytes that TMA has yet to write in the present phase

    def init(self, count: int) -> None:
        assert self.count == 0, "the mbarrier is initialized twice"
        self.count = self.missing = count

    def arrive(self, count: int = 1, n_bytes: int = 0) -> None:
        """Arrive `count` times, and expect that TMA writes n_bytes."""
        assert self.count > 0, "the mbarrier is not initialized"
        assert self.missing >= count, "more arrivals than the mbarrier expects in a phase"
        self.missing -= count
        self.bytes += n_bytes
        self._complete()

    def receive(self, n_bytes: int) -> None:
        """Count bytes that TMA has written. They may come before the arrival that expects them."""
        assert self.is_fenced, "TMA uses an mbarrier without a fence after its initialization"
        self.bytes -= n_bytes
        self._complete()

    def _complete(self) -> None:
        if self.missing == 0 and self.bytes == 0:
            self.completed += 1
            self.missing = self.count

    def has_completed(self, parity: int) -> bool:
        """Return whether the phase before the present one has this parity.

        Before the first phase is complete, this holds for parity 1.
        """
        assert self.count > 0, "the mbarrier is not initialized"
        return self.completed % 2 != parity


class Barriers:
    """An array of mbarriers."""

    def __init__(self, n: int):
        self._barriers = [Barrier() for _ in range(n)]
        self.shape = [n, 1]

    def index(self, i: int) -> Barrier:
        assert 0 <= i < len(self._barriers)
        return self._barriers[i]


class Descriptor:
    """TMA descriptor of a tensor in global memory, made from the one of a launch."""

    def __init__(self, descriptor: Any):
        dtype = descriptor.base.dtype
        size = 1 + sum(
            (n - 1) * stride for n, stride in zip(descriptor.shape, descriptor.strides, strict=True)
        )
        buffer = (ctypes.c_byte * (size * dtype.itemsize)).from_address(descriptor.base.data_ptr())
        memory = torch.frombuffer(buffer, dtype=dtype)
        self.tensor = torch.as_strided(memory, descriptor.shape, descriptor.strides)
        self.dtype, self.layout = DTYPES[dtype], descriptor.layout
        shape = list(descriptor.block_shape)
        self.block_type = SimpleNamespace(shape=shape, nbytes=math.prod(shape) * dtype.itemsize)

    def read(self, coord: Sequence[int]) -> Tensor:
        """Return the tile at `coord`. Elements outside of the tensor are zeros."""
        tile = torch.zeros(self.block_type.shape, dtype=self.dtype.torch)
        inside, of_tensor = self._overlap(coord)
        tile[inside] = self.tensor[of_tensor]
        return tile

    def write(self, coord: Sequence[int], tile: Tensor, adds: bool = False) -> None:
        """Write or add a tile at `coord`. Elements outside of the tensor are ignored."""
        inside, of_tensor = self._overlap(coord)
        if adds:
            self.tensor[of_tensor] += tile[inside]
        else:
            self.tensor[of_tensor] = tile[inside]

    def _overlap(self, coord: Sequence[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Return the elements inside of the tensor as slices of the tile and of the tensor."""
        inside, of_tensor = [], []
        dims = zip(coord, self.block_type.shape, self.tensor.shape, strict=True)
        for start, length, size in dims:
            first, last = min(max(start, 0), size), min(max(start + length, 0), size)
            inside.append(slice(first - start, last - start))
            of_tensor.append(slice(first, last))
        return tuple(inside), tuple(of_tensor)
