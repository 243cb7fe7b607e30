"""TMA descriptors of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch


class TensorMaps:
    """TMA descriptors of tensors that differ only in their addresses.

    All tensors have the same dtype, shape and strides. The dtype is float16, bfloat16 or float32.
    Strides are in elements. The last must be 1, and those of dimensions of size 1 are ignored.

    `tile` is the shape that one TMA copy transfers. Elements of a tile past the end of the tensor
    are read as zeros and are not written. With `swizzles`, tiles in shared memory are swizzled, as
    matmuls need it. Otherwise, a tile has its rows one after another.

    Raises:
        KeyError: if the dtype is not supported.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        shape: Sequence[int],
        strides: Sequence[int],
        tile: Sequence[int],
        swizzles: bool = True,
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
        if not swizzles:
            self.layout = gl.NVMMASharedLayout(0, dtype.itemsize * 8, len(self.tile))

    def at(self, address: int) -> Any:
        """Return the TMA descriptor of the tensor at an address, a multiple of 16 bytes."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        base = _Address(address, self.dtype)
        return TensorDescriptor(base, self.shape, self.strides, self.tile, self.layout)


class _Address(NamedTuple):
    """Address and dtype of a tensor, for Triton's TensorDescriptor. It does not keep its memory."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address
