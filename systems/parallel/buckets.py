"""Group parameters into buckets whose gradients are reduced together, and share them out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

AnyTensor = TypeVar("AnyTensor", bound=Tensor)
MB = 10**6


def fill_buckets(parameters: Iterable[AnyTensor], capacity: float) -> list[list[AnyTensor]]:
    """Group parameters into buckets of at most `capacity` bytes, in reverse order.

    The order is reversed because backward computes the gradients of the last layer first. Then
    these gradients can also be reduced first. All parameters of a bucket have the same dtype and
    device. A new bucket starts when the next parameter of the same dtype and device does not fit. A
    parameter larger than `capacity` gets a bucket of its own. After it, parameters that still fit
    are added to the previous bucket. Parameters come in the order of the model. Buckets are in the
    order in which they are complete if gradients become ready in reverse order.
    """
    open_buckets: dict[tuple[torch.dtype, torch.device], list[AnyTensor]] = {}
    filled: dict[tuple[torch.dtype, torch.device], int] = {}  # bytes in each open bucket
    last: dict[int, int] = {}  # position of a bucket's last parameter, by id(bucket)
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


def balance(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """Assign each parameter to a rank, so that all ranks have about the same number of bytes.

    Parameters are assigned in order of decreasing size. Each is assigned to the rank that has the
    fewest bytes at that moment. Sizes are in bytes. `loads`, the bytes that each rank already has,
    are updated in place.
    """
    owners = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = min(range(len(loads)), key=loads.__getitem__)
        loads[owners[i]] += sizes[i]
    return owners
