"""Which gradients travel together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor

AnyTensor = TypeVar("AnyTensor", bound=Tensor)
MB = 10**6


def fill_buckets(parameters: Iterable[AnyTensor], capacity: float) -> list[list[AnyTensor]]:
    """Parameters in buckets of at most `capacity` bytes, from the last parameter to the first.

    Backward reaches the last layer first, so its gradients can travel first. A bucket has one dtype
    and one device; one that is begun stays open until the next parameter of its kind does not fit.
    A parameter larger than the capacity has a bucket to itself.

    Returns:
        Buckets in the order in which they are complete if gradients come in reverse order.
    """
    open_buckets: dict[tuple[torch.dtype, torch.device], list[AnyTensor]] = {}
    place: dict[int, int] = {}  # of a bucket's last parameter, by the bucket's id
    buckets: list[list[AnyTensor]] = []
    for i, parameter in enumerate(reversed(list(parameters))):
        kind = parameter.dtype, parameter.device
        bucket = open_buckets.get(kind)
        if bucket is None or _bytes(bucket) + parameter.nbytes > capacity:
            bucket = open_buckets[kind] = []
            buckets.append(bucket)
        bucket.append(parameter)
        place[id(bucket)] = i
    return sorted(buckets, key=lambda bucket: place[id(bucket)])


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
