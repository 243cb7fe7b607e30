"""Check that the parameters of all ranks have the same names, shapes and dtypes, in the same order.

Collectives rely on equal parameters. Without this check, ranks with different parameters would wait
for each other until the timeout, or average tensors that do not belong together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_calls = 0  # of check_agreement so far; the largest number of all ranks


def check_agreement(
    named: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup, refusal: str | None = None
) -> int:
    """Check that all ranks have the same tensors. The values of the tensors may differ.

    Names, order, shapes, strides, dtypes and requires_grad are compared with those of rank 0. All
    ranks of the group must call this function. If all ranks agree, the only communication is an
    all-gather of 40 bytes per rank.

    Args:
        refusal: why this rank cannot use its tensors, if it cannot.

    Returns:
        A number that this function has not returned before, the same on all ranks.

    Raises:
        ValueError: on all ranks, if any rank differs or refuses; the message names the first
            difference of each rank that differs.
    """
    global _calls
    tensors = list(named)
    mine = [_description(name, tensor) for name, tensor in tensors]
    digest = hashlib.sha256("\n".join([str(refusal), *mine]).encode()).digest()
    device = tensors[0][1].device if tensors else torch.device("cpu")
    if "nccl" in dist.get_backend(group):  # NCCL needs GPU tensors
        device = torch.device("cuda", torch.cuda.current_device())
    content = digest + _calls.to_bytes(8, "little")
    own = torch.tensor(list(content), dtype=torch.uint8, device=device)
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(gathered, own, group=group)
    contents = [bytes(other.tolist()) for other in gathered]
    number = max(int.from_bytes(other[32:], "little") for other in contents)
    _calls = number + 1
    if refusal is None and len({other[:32] for other in contents}) == 1:
        return number
    by_rank: list[Any] = [None] * group.size()
    dist.all_gather_object(by_rank, (refusal, mine), group=group)
    refusals = {why: rank for rank, (why, _) in reversed(list(enumerate(by_rank))) if why}
    if refusals:
        raise ValueError("; ".join(f"rank {rank}: {why}" for why, rank in refusals.items()))
    first = by_rank[0][1]
    differences = [
        _difference(rank, theirs, first)
        for rank, (_, theirs) in enumerate(by_rank)
        if theirs != first
    ]
    raise ValueError(f"all ranks must have the same tensors: {'; '.join(differences)}")


def _description(name: str, tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    strides = "" if tensor.is_contiguous() else f" with strides {tensor.stride()}"
    frozen = "" if tensor.requires_grad else " frozen"
    return f"{name} {dtype} {tuple(tensor.shape)}{strides}{frozen}"


def _difference(rank: int, theirs: list[str], first: list[str]) -> str:
    for place, (there, here) in enumerate(zip(theirs, first, strict=False)):
        if there != here:
            return f"rank {rank} has {there!r} at position {place}, but rank 0 has {here!r}"
    place = min(len(theirs), len(first))
    more = f"rank {rank}" if len(theirs) > len(first) else "rank 0"
    only = max(theirs, first, key=len)[place]
    return (
        f"rank {rank} has {len(theirs)} tensors, but rank 0 has {len(first)}; "
        f"only {more} has {only!r}"
    )
