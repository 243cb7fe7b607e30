"""Tensors as Hopper's copy engine is told of them: what a launch needs to say where a tile lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

MOST_KEPT = 256  # addresses; an allocator gives the same ones again and again


class TensorMap:
    """Of one tensor. Triton encodes a descriptor anew at every launch; here it is done once."""

    __slots__ = ("_arguments", "descriptor")

    def __init__(self, descriptor: Any):
        self.descriptor = descriptor  # gluon's TensorDescriptor
        self._arguments: list[Any] | None = None

    def arguments(self, meta: dict[str, Any]) -> list[Any]:
        """What triton 3.6's launcher makes of the descriptor; meta: of the kernel's argument, which
        follows from the tile's shape and layout."""
        if self._arguments is None:
            from triton.backends.nvidia.driver import make_tensordesc_arg

            self._arguments = make_tensordesc_arg(self.descriptor, meta)
        return self._arguments


class TensorMaps:
    """Of all tensors of one dtype, shape and layout, by address.

    Args:
        dtype: float16, bfloat16 or float32.
        strides: in elements, the last 1; a dimension of one may have any.
        tile: shape of what is copied at once. What of it is past the end of a dimension is zeros
            when read, and not written.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        shape: Sequence[int],
        strides: Sequence[int],
        tile: Sequence[int],
    ):
        from triton.experimental.gluon import language as gl

        self.dtype, self.shape, self.tile = dtype, list(shape), list(tile)
        # A dimension of one has a stride that nobody uses and that the engine may refuse.
        self.strides = [
            shape[-1] if n == 1 else stride
            for n, stride in zip(shape[:-1], strides[:-1], strict=True)
        ] + [1]
        kinds = {
            torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32
        }  # fmt: skip
        self.layout = gl.NVMMASharedLayout.get_default_for(self.tile, kinds[dtype])
        self._made: dict[int, TensorMap] = {}

    def at(self, address: int) -> TensorMap:
        """Of the tensor there; 16 divides the address."""
        made = self._made.get(address)
        if made is None:
            from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

            base = _Address(address, self.dtype)
            made = TensorMap(
                TensorDescriptor(base, self.shape, self.strides, self.tile, self.layout)
            )
            if len(self._made) >= MOST_KEPT:
                self._made.clear()
            self._made[address] = made
        return made


class _Address(NamedTuple):
    """What a descriptor asks of a tensor. It does not keep the memory."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address
