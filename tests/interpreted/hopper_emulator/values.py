"""Scalars, tiles in registers, and pointers to global memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.interpreted.hopper_emulator.schedule import Operation


@dataclass(frozen=True)
class DType:
    """A dtype of Triton."""

    name: str
    torch: torch.dtype

    @property
    def primitive_bitwidth(self) -> int:
        return self.torch.itemsize * 8


NAMES = ("float32", "bfloat16", "float16", "int64", "int32", "int16", "bool")
DTYPES = {getattr(torch, name): DType(name, getattr(torch, name)) for name in NAMES}


class Int(int):
    """An integer scalar. Division rounds towards zero, as on the GPU."""

    def to(self, dtype: DType) -> Int:
        return self

    def __neg__(self) -> Int:
        return Int(-int(self))


def _quotient(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


OPERATORS_OF_INTEGERS: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "and": operator.and_,
    "or": operator.or_, "xor": operator.xor, "lshift": operator.lshift,
    "rshift": operator.rshift, "floordiv": _quotient,
    "mod": lambda a, b: a - b * _quotient(a, b),
}  # fmt: skip


def _define_operator_of_integers(name: str, of: Callable[[int, int], int]) -> None:
    """Let an operator of two integers, of which one is an `Int`, return an `Int`."""

    def forward(self: Int, other: Any) -> Any:
        if isinstance(other, int):
            return Int(of(int(self), int(other)))
        return getattr(int(self), f"__{name}__")(other)  # float, or NotImplemented for a tile

    def reflected(self: Int, other: int) -> Int:
        return Int(of(int(other), int(self)))

    setattr(Int, f"__{name}__", forward)
    setattr(Int, f"__r{name}__", reflected)


for _name, _of in OPERATORS_OF_INTEGERS.items():
    _define_operator_of_integers(_name, _of)


class Tile:
    """A tensor in registers.

    Args:
        raw: the values. None until the WGMMA that computes them is executed.
        operation: this WGMMA, until the program waits for it; None for other tensors.
    """

    def __init__(
        self, raw: Tensor | None, shape: Sequence[int], operation: Operation | None = None
    ):
        self.raw, self.shape, self.operation = raw, list(shape), operation

    @staticmethod
    def of(data: Tensor) -> Tile:
        return Tile(data, data.shape)

    @property
    def data(self) -> Tensor:
        assert self.operation is None, "the result of a WGMMA is used before the wait for it"
        assert self.raw is not None
        return self.raw

    @property
    def dtype(self) -> DType:
        return DTYPES[self.data.dtype]

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(layout=None)  # layouts are not emulated

    def to(self, dtype: DType, bitcast: bool = False) -> Tile:
        return Tile.of(self.data.view(dtype.torch) if bitcast else self.data.to(dtype.torch))

    def reshape(self, shape: Sequence[int]) -> Tile:
        return Tile.of(self.data.reshape(tuple(shape)))

    def permute(self, order: Sequence[int]) -> Tile:
        return Tile.of(self.data.permute(tuple(order)))

    def __getitem__(self, key: Any) -> Tile:
        return Tile.of(self.data[key])


def data_of(x: Any) -> Any:
    return x.data if isinstance(x, Tile) else x


def _define_operator_of_tiles(name: str) -> None:
    """Let an operator of a tile, and a tile or a number, return a tile.

    The operators of numbers return NotImplemented for a tile, so Python calls the reflected one.
    """
    of = getattr(operator, f"{name}_" if name in ("and", "or") else name)

    def forward(self: Tile, other: Any) -> Tile:
        if isinstance(other, Pointer):
            return NotImplemented
        return Tile.of(of(self.data, data_of(other)))

    def reflected(self: Tile, other: Any) -> Tile:
        return Tile.of(of(data_of(other), self.data))

    setattr(Tile, f"__{name}__", forward)
    setattr(Tile, f"__r{name}__", reflected)


OPERATORS_OF_TILES = (
    "add", "sub", "mul", "truediv", "and", "or", "rshift", "lt", "le", "gt", "ge", "eq", "ne",
)  # fmt: skip
for _name in OPERATORS_OF_TILES:
    _define_operator_of_tiles(_name)


class Pointer:
    """Addresses of elements of a tensor in global memory.

    Args:
        memory: the tensor and what follows it in memory, with one dimension.
        offset: indices of the elements, an integer or a tensor.
    """

    def __init__(self, memory: Tensor, offset: Any = 0):
        self.memory, self.offset = memory, offset

    @staticmethod
    def of(x: Tensor) -> Pointer:
        """Return the address of the first element of a tensor."""
        size = x.untyped_storage().nbytes() // x.itemsize - x.storage_offset()
        return Pointer(torch.as_strided(x, (size,), (1,)))

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=DTYPES[self.memory.dtype])

    def to(self, dtype: DType) -> Pointer:
        return self

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.offset + data_of(other))

    __radd__ = __add__

    def load(self) -> Int:
        """Return the integer at this address."""
        return Int(self.memory[self._checked(self.offset)].item())

    def load_masked(self, mask: Any, other: float) -> Tile:
        """Return a tile. Elements for which the mask is False are `other` and are not read."""
        chosen = mask.data.broadcast_to(self.offset.shape)
        data = torch.full(self.offset.shape, other, dtype=self.memory.dtype)
        data[chosen] = self.memory[self._checked(self.offset[chosen])]
        return Tile.of(data)

    def store(self, value: Any, mask: Any = None, adds: bool = False) -> None:
        """Store or add a tile, or its elements for which the mask is True, or store a number."""
        if not isinstance(self.offset, Tensor):
            self.memory[self._checked(self.offset)] = value
            return
        offset, data = torch.broadcast_tensors(self.offset, value.data)
        if mask is not None:
            chosen = mask.data.broadcast_to(offset.shape)
            offset, data = offset[chosen], data[chosen]
        if adds:
            data = self.memory[self._checked(offset)] + data
        self.memory[self._checked(offset)] = data

    def _checked(self, offset: Any) -> Any:
        """Return the offset. Raise an IndexError if it is outside of the memory of the tensor."""
        every = torch.as_tensor(offset)
        if every.numel() and (every.min() < 0 or every.max() >= len(self.memory)):
            raise IndexError(
                f"elements {every.min()} to {every.max()} of a tensor of {len(self.memory)}"
            )
        return offset
