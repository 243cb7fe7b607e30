"""TMA descriptors of tensors, cached by address."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

# Descriptors kept by one TensorMaps. The caching allocator returns the same addresses repeatedly.
MAX_ADDRESSES = 256


class TensorMap:
    """TMA descriptor of one tensor, encoded once. Triton alone would encode it in every launch."""

    __slots__ = ("_arguments", "descriptor")

    def __init__(self, descriptor: Any):
        self.descriptor = descriptor  # gluon's TensorDescriptor
        self._arguments: list[Any] | None = None

    def arguments(self, meta: dict[str, Any]) -> list[Any]:
        """Return the kernel arguments into which Triton 3.6's launcher expands the descriptor.

        Args:
            meta: `tensordesc_meta` of the kernel argument. It depends only on the shape and layout
                of the tile, so the result of the first call is returned by all others.
        """
        if self._arguments is None:
            from triton.backends.nvidia.driver import make_tensordesc_arg

            self._arguments = make_tensordesc_arg(self.descriptor, meta)
        return self._arguments


class TensorMaps:
    """TMA descriptors of tensors with one dtype, shape and layout, looked up by address.

    Args:
        dtype: float16, bfloat16 or float32.
        shape: shape of the tensors.
        strides: in elements; the last must be 1. Strides of dimensions of size 1 are ignored.
        tile: shape of one TMA copy. Elements past the end of a dimension are read as zeros and not
            written.

    Raises:
        KeyError: if the dtype is not supported.
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
        # TMA may reject the stride of a dimension of size 1, although it does not use it.
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
        """Return the descriptor of the tensor at this address, which must be a multiple of 16."""
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
    """Stand-in for a tensor in a descriptor, which does not own the memory."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address
