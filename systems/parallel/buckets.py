"""Group parameters into buckets, share them out, and lay them side by side in memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

AnyTensor = TypeVar("AnyTensor", bound=Tensor)
MB = 10**6
ALIGNMENT = 256  # of tensors side by side, in bytes; vectorized kernels and NCCL need 16


def fill_buckets(parameters: Iterable[AnyTensor], capacity: float) -> list[list[AnyTensor]]:
    """Group parameters into buckets of at most `capacity` bytes, in reverse order.

    Parameters come in the order of the model. Backward computes the gradients of the last layer
    first, so buckets are in the order in which their gradients become complete. All parameters of a
    bucket have the same dtype and device. A parameter larger than `capacity` gets a bucket of its
    own. After it, parameters that still fit are added to the previous bucket.
    """
    open_buckets: dict[tuple[torch.dtype, torch.device], list[AnyTensor]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}  # bytes in each open bucket
    buckets: list[list[AnyTensor]] = []
    in_order = list(reversed(list(parameters)))
    for parameter in in_order:
        kind = parameter.dtype, parameter.device
        if parameter.nbytes > capacity:
            buckets.append([parameter])
            continue
        if kind not in open_buckets or filled[kind] + parameter.nbytes > capacity:
            open_buckets[kind], filled[kind] = [], 0
            buckets.append(open_buckets[kind])
        open_buckets[kind].append(parameter)
        filled[kind] += parameter.nbytes
    position = {parameter: i for i, parameter in enumerate(in_order)}
    return sorted(buckets, key=lambda bucket: position[bucket[-1]])


def balance(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Return a rank for each parameter, so that all ranks have about the same number of bytes.

    The next largest goes to the rank with the fewest bytes so far. `sizes` are in bytes. `loads`,
    the bytes that each rank already has, are updated in place.
    """
    owners = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = min(range(len(loads)), key=loads.__getitem__)
        loads[owners[i]] += sizes[i]
    return owners


def packed_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors side by side in memory."""
    return sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)


def places(memory: Tensor, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return one-dimensional places for tensors, side by side from the start of a uint8 tensor.

    Each has a storage of its own, because torch cannot save a storage with tensors of two dtypes.
    """
    found, storage, start = [], memory.untyped_storage(), memory.storage_offset()
    for tensor in tensors:
        place = torch.empty(0, dtype=tensor.dtype, device=memory.device)
        part: Any = storage[start : start + tensor.nbytes]
        found.append(place.set_(part, 0, (tensor.numel(),), (1,)))
        start += packed_bytes([tensor])
    return found


def strides_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a dense copy of a tensor."""
    return torch.empty_like(tensor, device="meta").stride()


def dense_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor with the strides of a dense copy of another, which has its shape.

    It is a copy if need be.
    """
    if tensor.is_contiguous() and like.is_contiguous():  # quick, and nearly always so
        return tensor
    if tensor.stride() == strides_of(like):
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)


def in_memory_order(dense: Tensor) -> Tensor:
    """Return a dense tensor as one dimension, in the order of its memory.

    `.data` has a version counter of its own, so an average is no change by the user.
    """
    return dense.data.as_strided((dense.numel(),), (1,))


def shaped_as(flat: Tensor, like: Tensor) -> Tensor:
    """Return a one-dimensional tensor with the shape and strides of a dense copy of another."""
    strides = like.stride() if like.is_contiguous() else strides_of(like)
    return flat.as_strided(like.shape, strides)
