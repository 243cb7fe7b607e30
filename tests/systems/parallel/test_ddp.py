"""DDP wrappers on 2 and 4 ranks: unusual parameters and gradients, communication, and errors.

test_situations.py compares whole trainings with those in one process.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from systems.parallel import (
    BucketedDDP,
    FullyShardedDataParallel,
    NaiveDDP,
    OverlappedDDP,
    PeerDDP,
    ShardedOptimizer,
    peer_memory,
)
from systems.parallel.buckets import fill_buckets
from tests.systems.parallel.parallel_models import (
    WIDTH,
    Branches,
    Mixed,
    Tied,
    assert_same_on_all_ranks,
)
from tests.systems.parallel.ranks import FOUR, GPUS, TWO, RankContext, on_ranks
from tests.systems.parallel.situations import OURS, Net, Run, Strided, collectives

DDP = ("naive", "flat", "overlapped", "bucketed", "peer")
all_wrappers = pytest.mark.parametrize("name", DDP)


@on_ranks(TWO, GPUS)
@all_wrappers
def test_mixed_dtypes(here: RankContext, name: str) -> None:
    """Each gradient is the mean over the ranks, in the dtype of its parameter."""
    run = Run(here, OURS[name])
    run.make(Mixed)
    reference = Mixed().to(here.device)
    reference.load_state_dict(run.model.state_dict())
    run.backward(0)
    for x in Run(here, None).shares(0):
        F.mse_loss(reference(x.float()), x[:, :1].float()).div(here.world_size).backward()
    for p, q in zip(run.model.parameters(), reference.parameters(), strict=True):
        assert p.grad.dtype == p.dtype
        tolerance = 2e-2 if p.dtype == torch.bfloat16 else here.tolerance
        torch.testing.assert_close(p.grad, q.grad, atol=tolerance, rtol=tolerance)
    assert_same_on_all_ranks(p.grad for p in run.model.parameters())


class Sum(nn.Module):
    """Model with parameters whose gradients autograd gives the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.zeros(3, 4)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a[None] + self.b[None] + self.c[None] + x


@on_ranks(TWO, GPUS)
@pytest.mark.parametrize(("name", "sharded"), [*((name, False) for name in DDP), ("peer", True)])
def test_gradients_that_share_memory(here: RankContext, name: str, sharded: bool) -> None:
    wrapped = OURS[name].wrap(Sum().to(here.device))
    options = {"shard_gradients": wrapped, "peer_memory": True} if sharded else {}
    optimizer = ShardedOptimizer(wrapped.parameters(), torch.optim.SGD, lr=1.0, **options)
    x = torch.full((2, 3, 4), 1.0 + here.rank, device=here.device)
    (wrapped(x) * x).sum().backward()
    optimizer.step()
    for parameter in wrapped.parameters():
        torch.testing.assert_close(parameter, torch.full_like(parameter, -1.0 - here.world_size))


@on_ranks(TWO, GPUS)
@all_wrappers
def test_gradients_have_the_strides_of_their_parameters(here: RankContext, name: str) -> None:
    """Fused optimizers rely on it. The memory format of PeerDDP must not change later."""
    run = Run(here, OURS[name])
    run.make(lambda: Net(Strided(2)))
    run.backward(0)
    assert all(p.grad.stride() == p.stride() for p in run.model.parameters())
    if name == "peer":
        run.model.to(memory_format=torch.contiguous_format)
        with pytest.raises(RuntimeError, match="memory format of parameters must not change"):
            run.train(1)


@on_ranks(TWO)
def test_shared_memory_leaves_no_files(here: RankContext) -> None:
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        with mock.patch.object(peer_memory, "SHARED_FOLDER", Path(folders[0])):
            run = Run(here, OURS["peer"])
            run.make()
        run.train(0)  # by now, all ranks have the files
        assert not os.listdir(folders[0])
        dist.barrier()


@on_ranks(TWO, GPUS)
def test_one_rank_has_no_peers(here: RankContext) -> None:
    group = [dist.new_group([rank]) for rank in range(here.world_size)][here.rank]
    with pytest.warns(UserWarning, match="there is only one rank"):
        wrapped = PeerDDP(nn.Linear(2, 1).to(here.device), 1, process_group=group)
    wrapped(torch.ones(1, 2, device=here.device)).sum().backward()
    assert wrapped.module.weight.grad.tolist() == [[1.0, 1.0]]
    dist.destroy_process_group(group)


@on_ranks(TWO, GPUS)
def test_a_rank_that_updates_nothing_refuses_what_the_others_refuse(here: RankContext) -> None:
    run = Run(here, OURS["sharded_gradients"])
    run.make(lambda: nn.Linear(WIDTH, 1, bias=False))
    run.backward(0)
    assert run.made.weight.grad.any() == (here.rank == 0)
    with pytest.raises(RuntimeError, match="must not add to averaged gradients"):
        run.backward(1)


@on_ranks(TWO, GPUS)
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("name", [*DDP, "sharded_gradients"])
def test_gradients_that_are_lazily_negated(here: RankContext, name: str, by_hand: bool) -> None:
    """Their memory has other values than the gradients, on one rank only."""
    run = Run(here, OURS[name])
    run.make(lambda: nn.Linear(3, 1, bias=False))
    weight = run.made.weight
    gradient = torch.full_like(weight, 1.0 + here.rank)

    def lazy(given: torch.Tensor) -> torch.Tensor:
        return torch._neg_view(-given) if here.rank == 0 else given

    if by_hand:
        weight.grad = lazy(gradient)
    else:
        weight.register_hook(lazy)
        run.model(gradient).sum().backward()
    run.finish()
    if name != "sharded_gradients" or here.rank == 0:  # which owns it
        assert weight.grad is not None
        assert weight.grad.tolist() == [[(1 + here.world_size) / 2] * 3]


@on_ranks(TWO, GPUS)
@pytest.mark.parametrize("name", ["naive", "overlapped", "bucketed"])
def test_gradients_are_averaged_in_place(here: RankContext, name: str) -> None:
    """Neither new gradients nor those that were zeroed in place are copied."""
    run = Run(here, OURS[name])
    model, arrived = run.new(), {}

    def note(parameter: torch.Tensor) -> None:
        arrived[parameter] = parameter.grad.data_ptr()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(note)
    run.use(model)
    for step in range(3):
        run.zero_grad(set_to_none=False)
        run.backward(step)
        assert arrived == {p: p.grad.data_ptr() for p in model.parameters()}


@on_ranks(TWO, FOUR, GPUS)
@all_wrappers
def test_unused_parameters_differ(here: RankContext, name: str) -> None:
    """With three ranks or more, a layer is unused on some ranks and used on several others."""
    torch.manual_seed(here.rank)
    wrapped = OURS[name].wrap(Branches().to(here.device))
    reference = Branches().to(here.device)
    reference.load_state_dict(wrapped.state_dict())
    x = torch.ones(2, 3, device=here.device)
    # Layer 1 is used on rank 0 only, layer 3 on all other ranks, layer 2 on no rank; the order of
    # layers also differs.
    used = [[0, 1]] + [[3, 0]] * (here.world_size - 1)
    for _ in range(2):
        wrapped.zero_grad()
        reference.zero_grad()
        wrapped(x, used[here.rank]).sum().backward()
        wrapped.finish_gradient_synchronization()
        for layers in used:
            reference(x, layers).sum().div(here.world_size).backward()
        for p, q in zip(wrapped.parameters(), reference.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if q.grad is not None:
                torch.testing.assert_close(p.grad, q.grad)
    wrapped.zero_grad()
    wrapped.finish_gradient_synchronization()  # a step that used no parameter
    assert all(p.grad is None for p in wrapped.parameters())


@on_ranks(TWO, GPUS)
@pytest.mark.parametrize(
    ("name", "expected"), [("naive", 0), ("flat", 0), ("overlapped", 5), ("bucketed", 1)]
)
def test_gradients_go_out_during_backward(here: RankContext, name: str, expected: int) -> None:
    """At least `expected` collectives have started when backward reaches the input of the model."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(6))).to(here.device)
    wrapped = OURS[name].wrap(model)  # three weights fit in a bucket
    for _ in range(2):
        x = torch.ones(2, 4, device=here.device, requires_grad=True)
        out = wrapped(x).sum()
        before = collectives()
        counted: list[int] = []
        # It is undefined whether this hook runs before or after the gradient of the first weight
        # is ready. The gradients of all other weights are ready.
        x.register_hook(lambda _, counted=counted: counted.append(collectives()))
        out.backward()
        after = collectives()
        wrapped.finish_gradient_synchronization()
        assert collectives() == after  # the gradients are averaged already
        assert counted[0] - before >= expected
        assert (counted[0] - before > 0) == (expected > 0)


@on_ranks(TWO, GPUS)
@pytest.mark.parametrize("name", [*DDP, "fsdp"])
def test_sparse_gradients_are_refused(here: RankContext, name: str) -> None:
    wrapped = OURS[name].wrap(nn.Embedding(4, 2, sparse=True).to(here.device))
    with pytest.raises(RuntimeError, match="gradients must be dense"):
        wrapped(torch.tensor([1], device=here.device)).sum().backward()
        wrapped.finish_gradient_synchronization()


# What the last rank has instead of nn.Linear(4, 2) after nn.Linear(3, 4), and what is told of it
OTHER_MODULES = [
    (lambda: [nn.Linear(4, 5)], "1.weight float32 (5, 4) at position 2, and rank 0 has 1.w"),
    (lambda: [nn.Linear(4, 2), nn.PReLU()], "(1,) at position 4, and rank 0 has nothing"),
    (list, "nothing at position 2, and rank 0 has 1.weight"),
    (lambda: [nn.Identity(), nn.Linear(4, 2)], "2.weight float32 (2, 4) at position 2, and rank 0"),
    (lambda: [nn.Linear(4, 2).double()], "float64 (2, 4) at position 2"),
    (lambda: [nn.Linear(4, 2).requires_grad_(False)], "(2, 4) frozen at position 2"),
]


@on_ranks(TWO, FOUR, GPUS, repeats=1)
@pytest.mark.parametrize("wrap", [OverlappedDDP, FullyShardedDataParallel])
def test_different_models_are_refused(here: RankContext, wrap: type[nn.Module]) -> None:
    last = here.world_size - 1
    for others, words in OTHER_MODULES:
        modules = others() if here.rank == last else [nn.Linear(4, 2)]
        with pytest.raises(ValueError, match=f"rank {last} has .*{re.escape(words)}"):
            wrap(nn.Sequential(nn.Linear(3, 4), *modules).to(here.device))


@on_ranks(TWO, repeats=1)
@pytest.mark.parametrize("wrap", [NaiveDDP, FullyShardedDataParallel])
def test_an_embedding_that_changes_its_weight_is_refused(here: RankContext, wrap: Any) -> None:
    with pytest.raises(ValueError, match="rank 1: embed has max_norm"):
        wrap(nn.ModuleDict({"embed": nn.Embedding(4, 2, max_norm=1.0)}))


def test_buckets_are_filled_from_the_last_parameter():
    sizes = [5, 1, 3, 2, 9]  # float32: 4 bytes each
    parameters = [torch.empty(n) for n in sizes]
    buckets = fill_buckets(parameters, 24)
    assert [[len(p) for p in bucket] for bucket in buckets] == [[9], [2, 3, 1], [5]]
    assert [len(b) for b in fill_buckets(parameters, 0)] == [1] * 5
    assert [len(b) for b in fill_buckets(parameters, float("inf"))] == [5]
    assert fill_buckets([], 24) == []
    around = fill_buckets([torch.empty(n) for n in (2, 9, 3)], 20)  # 9 do not fit in a bucket
    assert [[len(p) for p in bucket] for bucket in around] == [[9], [3, 2]]


def test_a_bucket_has_one_dtype_and_stands_where_it_is_complete():
    single, double = torch.empty(1), torch.empty(1, dtype=torch.float64)
    parameters = [single, double, double.clone(), single.clone()]
    buckets = fill_buckets(parameters, 100)
    assert [bucket[0].dtype for bucket in buckets] == [torch.float64, torch.float32]
    assert [len(bucket) for bucket in buckets] == [2, 2]


@pytest.mark.parametrize("size", [0, -1, float("nan")])
def test_a_bucket_without_room_is_refused(size):
    with pytest.raises(ValueError, match=f"bucket_size_mb must be more than 0, got {size}"):
        BucketedDDP(Tied(), size)


def test_without_a_process_group_it_says_what_to_call():
    with pytest.raises(RuntimeError, match="no process group: call"):
        NaiveDDP(Tied())
