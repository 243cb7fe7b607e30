"""Group parameters into buckets whose gradients are reduced together."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import Tensor

AnyTensor = TypeVar("AnyTensor", bound=Tensor)
MB = 10**6


def fill_buckets(parameters: Iterable[AnyTensor], capacity: float) -> list[list[AnyTensor]]:
    """Group parameters into buckets of at most `capacity` bytes, from the last to the first.

    Backward reaches the last layer first, so its gradients can be sent first. A bucket has one
    dtype and one device, and stays open until the next parameter of its kind does not fit. A
    parameter larger than the capacity has a bucket to itself; the open bucket stays open.

    Returns:
        Buckets in the order in which they complete if gradients arrive in reverse order.
    """
    open_buckets: dict[tuple[torch.dtype, torch.device], list[AnyTensor]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}  # bytes in each
    last: dict[int, int] = {}  # place of a bucket's last parameter, by the bucket's id
    buckets: list[list[AnyTensor]] = []
    for place, parameter in enumerate(reversed(list(parameters))):
        kind = parameter.dtype, parameter.device
        if parameter.nbytes > capacity:
            buckets.append([parameter])
            last[id(buckets[-1])] = place
            continue
        if kind not in open_buckets or filled[kind] + parameter.nbytes > capacity:
            open_buckets[kind], filled[kind] = [], 0
            buckets.append(open_buckets[kind])
        open_buckets[kind].append(parameter)
        filled[kind] += parameter.nbytes
        last[id(open_buckets[kind])] = place
    return sorted(buckets, key=lambda bucket: last[id(bucket)])
