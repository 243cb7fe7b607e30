"""TMA descriptors of tensors, cached by the address of the tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from systems.kernels.triton_driver import encoded_descriptor

# Maximum number of descriptors in the cache of one TensorMaps. A small cache is enough, because
# PyTorch's caching allocator returns the same addresses repeatedly.
MAX_ADDRESSES = 256


class TensorMap:
    """TMA descriptor of one tensor, with a cache of its encoded form.

    Triton's own launcher encodes a descriptor again in every launch. Here it is encoded only once.
    """

    __slots__ = ("_arguments", "descriptor")

    def __init__(self, descriptor: Any):
        self.descriptor = descriptor  # TensorDescriptor of Gluon
        self._arguments: list[Any] | None = None

    def arguments(self, meta: dict[str, Any]) -> list[Any]:
        """Return the result of `encoded_descriptor`.

        Only the first call uses `meta`, and later calls return the same list.
        """
        if self._arguments is None:
            self._arguments = encoded_descriptor(self.descriptor, meta)
        return self._arguments


class TensorMaps:
    """TMA descriptors of tensors that differ only in their addresses.

    All tensors have the same dtype, shape and strides. A descriptor is created when its address is
    first requested, and then cached. The dtype is float16, bfloat16 or float32. Strides are in
    elements. The last must be 1, and those of dimensions of size 1 are ignored.

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
        self._made: dict[int, TensorMap] = {}

    def at(self, address: int) -> TensorMap:
        """Return the TMA descriptor of the tensor at an address.

        The address must be a multiple of 16 bytes.
        """
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
    """Address and dtype of a tensor. Triton's TensorDescriptor accepts this object as a tensor.

    Unlike a tensor, this object does not keep the memory of the tensor allocated.
    """

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address
