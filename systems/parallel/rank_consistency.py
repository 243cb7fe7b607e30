"""Check that the parameters of all ranks have the same names, shapes and dtypes, in the same order.

Collectives rely on equal parameters. Without this check, ranks with different parameters would wait
for each other until the timeout, or average tensors that do not belong together.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import torch.distributed as dist
from torch import Tensor

_calls = 0  # of check_agreement so far; the largest number of all ranks


def check_agreement(
    named: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup, refusal: str | None = None
) -> int:
    """Check that all ranks have the same tensors. The values of the tensors may differ.

    Names, order, shapes, strides, dtypes and requires_grad are compared with those of rank 0. All
    ranks of the group must call this function. `refusal` tells why this rank cannot use its
    tensors.

    Returns:
        A number that this function has not returned before, the same on all ranks.

    Raises:
        ValueError: on all ranks, if any rank differs or refuses; the message names the first
            difference of each rank that differs.
    """
    global _calls
    by_rank: list[Any] = [None] * group.size()
    mine = [_description(name, tensor) for name, tensor in named]
    dist.all_gather_object(by_rank, (_calls, refusal, mine), group=group)
    number = max(calls for calls, _, _ in by_rank)
    _calls = number + 1
    problems = [f"rank {rank}: {why}" for rank, (_, why, _) in enumerate(by_rank) if why]
    for rank, (_, _, theirs) in enumerate(by_rank) if not problems else ():
        for place, (there, here) in enumerate(zip_longest(theirs, by_rank[0][2])):
            if there != here:
                problems.append(
                    f"all ranks must have the same tensors, but rank {rank} has "
                    f"{there or 'nothing'} at position {place}, and rank 0 has {here or 'nothing'}"
                )
                break
    if problems:
        raise ValueError("; ".join(problems))
    return number


def _description(name: str, tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    strides = "" if tensor.is_contiguous() else f" with strides {tensor.stride()}"
    frozen = "" if tensor.requires_grad else " frozen"
    return f"{name} {dtype} {tuple(tensor.shape)}{strides}{frozen}"
