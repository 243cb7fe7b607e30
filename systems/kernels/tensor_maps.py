"""TMA descriptors of tensors, cached by address."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

MAX_ADDRESSES = 256  # an allocator returns the same addresses again and again


class TensorMap:
    """Descriptor of one tensor, encoded once. Triton encodes it anew for every launch."""

    __slots__ = ("_arguments", "descriptor")

    def __init__(self, descriptor: Any):
        self.descriptor = descriptor  # gluon's TensorDescriptor
        self._arguments: list[Any] | None = None

    def arguments(self, meta: dict[str, Any]) -> list[Any]:
        """Return what triton 3.6's launcher passes to the kernel for the descriptor.

        Args:
            meta: of the kernel's argument; depends only on the tile's shape and layout.
        """
        if self._arguments is None:
            from triton.backends.nvidia.driver import make_tensordesc_arg

            self._arguments = make_tensordesc_arg(self.descriptor, meta)
        return self._arguments


class TensorMaps:
    """Descriptors of tensors of one dtype, shape and layout, by address.

    Args:
        dtype: float16, bfloat16 or float32.
        strides: in elements, the last 1; a dimension of one may have any.
        tile: shape of a copy. Elements past the end of a dimension read as zeros and are not
            written.
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
        # The stride of a dimension of one is not used, and TMA may refuse it.
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
        """Return the descriptor of the tensor at this address, a multiple of 16."""
        made = self._made.get(address)
        if made is None:
            from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

            base = _Address(address, self.dtype)
            made = TensorMap(
                TensorDescriptor(base, self.shape, self.strides, self.tile, self.layout)
            )
            if len(self._made) >= MAX_ADDRESSES:
                self._made.clear()
            self._made[address] = made
        return made


class _Address(NamedTuple):
    """The part of a tensor that a descriptor needs. It does not own the memory."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address
