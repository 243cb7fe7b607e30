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


def check_agreement(named: Iterable[tuple[str, Tensor]], group: dist.ProcessGroup) -> None:
    """Check that all ranks have the same tensors. The values of the tensors may differ.

    Names, order, shapes, strides, dtypes and requires_grad are compared with those of rank 0. All
    ranks of the group must call this function. If all ranks agree, the only communication is an
    all-gather of 32 bytes per rank.

    Raises:
        ValueError: on all ranks, if any rank differs; the message names the first difference of
            each rank that differs.
    """
    tensors = list(named)
    mine = [_description(name, tensor) for name, tensor in tensors]
    digest = hashlib.sha256("\n".join(mine).encode()).digest()
    device = tensors[0][1].device if tensors else torch.device("cpu")
    if "nccl" in dist.get_backend(group):  # NCCL needs GPU tensors
        device = torch.device("cuda", torch.cuda.current_device())
    own = torch.tensor(list(digest), dtype=torch.uint8, device=device)
    digests = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(digests, own, group=group)
    if len({bytes(digest.tolist()) for digest in digests}) == 1:
        return
    by_rank: list[Any] = [None] * group.size()
    dist.all_gather_object(by_rank, mine, group=group)
    first = by_rank[0]
    differences = [
        _difference(rank, theirs, first) for rank, theirs in enumerate(by_rank) if theirs != first
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
