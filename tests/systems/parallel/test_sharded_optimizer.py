"""ShardedOptimizer on 2 and 4 ranks has the same results as the optimizer that it wraps."""

from __future__ import annotations

import copy
import io
from collections import defaultdict
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from systems.kernels.adamw import FusedAdamW
from systems.parallel import BucketedDDP, PeerDDP, ShardedOptimizer, sharded_optimizer
from systems.parallel.sharded_optimizer import balance
from tests.systems.parallel.parallel_models import (
    assert_close,
    assert_same_on_all_ranks,
    build,
    train,
)
from tests.systems.parallel.ranks import FOUR, GPUS, TWO, RankContext, on_ranks

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    # lr / eps = 1, so an error of a gradient is not amplified in the update of its weight.
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "eps": 1e-2}),
    "fused_adamw": (FusedAdamW, {"lr": 1e-2, "eps": 1e-2}),
    "rprop": (torch.optim.Rprop, {"lr": 1e-2}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "eps": 1e-2}),  # has state before its first step
}


def _groups(model):
    """Return two parameter groups with different learning rates."""
    parameters = list(model.parameters())
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 3e-3}]


def _dtypes(state_dict):
    return {
        i: {name: value.dtype for name, value in values.items()}
        for i, values in state_dict["state"].items()
    }


def trains_as_one_process(here: RankContext, name: str, optimizer: str, chunk_bytes: int) -> None:
    kind, options = OPTIMIZERS[optimizer]
    reference = build(name, 0, here.device)
    wrapped = BucketedDDP(build(name, here.rank, here.device), 1)
    theirs = kind(_groups(reference), **options)
    with mock.patch.object(sharded_optimizer, "CHUNK_BYTES", chunk_bytes):
        ours = ShardedOptimizer(_groups(wrapped), kind, **options)
    assert ours.defaults == theirs.defaults
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(o, 0.05, total_steps=9, cycle_momentum=False)
        for o in (ours, theirs)
    ]
    train(here, wrapped, ours, name, range(3), schedulers[0])
    train(here, reference, theirs, name, range(3), schedulers[1])
    assert_close(wrapped.module, reference, here.tolerance)
    assert_same_on_all_ranks(wrapped.parameters())
    assert [g["lr"] for g in ours.param_groups] == [g["lr"] for g in theirs.param_groups]

    # Each parameter has state on exactly one rank.
    mine = torch.tensor([p in ours.state for p in wrapped.parameters()], dtype=torch.int32)
    mine = mine.to(here.device)
    dist.all_reduce(mine)
    assert mine.tolist() == [int(q in theirs.state) for q in reference.parameters()]

    # The unsharded optimizer can load the gathered state and continue from it.
    whole, known = ours.state_dict(), theirs.state_dict()
    assert whole["param_groups"] == known["param_groups"]
    assert _dtypes(whole) == _dtypes(known)
    plain_model = build(name, 99, here.device)
    plain_model.load_state_dict(wrapped.state_dict())
    plain = kind(_groups(plain_model), **options)
    plain.load_state_dict(whole)
    train(here, wrapped, ours, name, range(3, 5))
    train(here, plain_model, plain, name, range(3, 5))
    assert_close(wrapped.module, plain_model, here.tolerance)


@on_ranks(TWO, GPUS)
@pytest.mark.parametrize(
    ("name", "optimizer", "chunk_bytes"),
    [
        ("toy", "sgd", 10**9),
        ("toy", "rprop", 100),
        ("toy", "adagrad", 100),
        ("tied", "adamw", 100),
        ("transformer", "adamw", 2000),
        ("transformer", "fused_adamw", 10**9),
    ],
)
def test_trains_as_one_process(here, name, optimizer, chunk_bytes):
    trains_as_one_process(here, name, optimizer, chunk_bytes)


@on_ranks(FOUR)
def test_four_ranks_train_as_one_process(here):
    trains_as_one_process(here, "transformer", "adamw", 2000)


@on_ranks(TWO, FOUR, GPUS)
def test_resharded(here: RankContext) -> None:
    """State is loaded with a smaller and with a larger world_size than it was saved with."""
    half = dist.new_group(list(range(here.world_size // 2)))
    kind, options = OPTIMIZERS["adamw"]
    reference, model = (build("transformer", 0, here.device) for _ in range(2))
    theirs, everyone = (kind(_groups(each), **options) for each in (reference, model))
    train(here, reference, theirs, "transformer", range(5))
    train(here, model, everyone, "transformer", range(1))
    if here.rank < here.world_size // 2:
        small = ShardedOptimizer(_groups(model), kind, process_group=half, **options)
        small.load_state_dict(everyone.state_dict())
        train(here, model, small, "transformer", range(1, 3))
        kept = [small.state_dict()]
        last = half.size() - 1
        assert bool(small.state_dict(to=last)["state"]) == (here.rank == last)
    else:
        kept = [None]
        train(here, model, everyone, "transformer", range(1, 3))
    dist.broadcast_object_list(kept, src=0)
    large = ShardedOptimizer(_groups(model), kind, **options)
    large.load_state_dict(kept[0])
    train(here, model, large, "transformer", range(3, 5))
    assert_close(model, reference, here.tolerance)
    dist.destroy_process_group(half)


@on_ranks(TWO, FOUR, GPUS)
def test_few_parameters_and_one_more_group(here: RankContext) -> None:
    """Some ranks own no parameters, and a parameter group is added later."""
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(3, device=here.device)) for _ in range(4)]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    sharded = ShardedOptimizer(ours[:1], torch.optim.Adam, lr=0.1)
    plain = torch.optim.Adam(theirs[:1], lr=0.1)
    for o, parameters in ((sharded, ours), (plain, theirs)):
        for i in range(4):
            if i == 2:
                o.add_param_group({"params": parameters[1:], "lr": 0.01})
            for j, p in enumerate(parameters):
                p.grad = None if j == 3 else p.detach() * (i + 1)
            o.step()
        o.zero_grad()
        assert all(p.grad is None for p in parameters)
    assert all(torch.equal(p, q) for p, q in zip(ours, theirs, strict=True))
    assert sharded.state_dict()["param_groups"] == plain.state_dict()["param_groups"]


@on_ranks(TWO, FOUR, GPUS)
@pytest.mark.parametrize("peer_memory", [False, True])
def test_parameters_of_several_dtypes_keep_their_strides(here, peer_memory):
    """They can also be saved, although they share memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3).double(), nn.Conv2d(4, 2, 1).bfloat16())
    model = model.to(here.device, memory_format=torch.channels_last)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, peer_memory=peer_memory, lr=1)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() / 2
    optimizer.step()
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert parameter.stride() == old.stride()
        assert torch.equal(parameter, old / 2)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    read = torch.load(file)
    assert all(torch.equal(read[name], value) for name, value in model.state_dict().items())


@on_ranks(TWO)
def test_a_state_from_before_the_first_step(here: RankContext) -> None:
    parameter = nn.Parameter(torch.ones(2))  # one rank has none
    optimizer = ShardedOptimizer([parameter], torch.optim.Adam, lr=torch.tensor(0.5))
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["lr"].fill_(0.25)
    assert saved["param_groups"][0]["lr"] == 0.5  # options that are loaded are copies
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 1


@on_ranks(TWO)
def test_states_that_the_user_changes(here: RankContext) -> None:
    """What one optimizer does, also with values that a rank has for parameters of another one."""
    states = []
    for kind in (torch.optim.Adam, lambda p, **k: ShardedOptimizer(p, torch.optim.Adam, **k)):
        parameters = [nn.Parameter(torch.ones(2)) for _ in range(3)]
        optimizer = kind(parameters, lr=0.5)
        for average in (None, torch.ones(2)):
            for parameter in parameters:
                parameter.grad = torch.ones(2)
                if average is not None:
                    optimizer.state[parameter]["average"] = average
            optimizer.step()
        states.append(optimizer.state_dict()["state"])
        optimizer.state = defaultdict(dict)
        optimizer.step()
        states.append(optimizer.state_dict()["state"])
    torch.testing.assert_close(states[2:], states[:2], rtol=0, atol=0)


@on_ranks(TWO)
@pytest.mark.parametrize("loads", [False, True])
def test_options_that_are_gone(here: RankContext, loads: bool) -> None:
    """Options that a loaded state or the user has removed are gone, as with one optimizer."""
    groups = []
    for kind in (torch.optim.SGD, lambda p, **k: ShardedOptimizer(p, torch.optim.SGD, **k)):
        optimizer = kind([nn.Parameter(torch.ones(2)) for _ in range(2)], lr=0.1)
        saved = copy.deepcopy(optimizer.state_dict())
        group = optimizer.param_groups[0]
        group["mine"], group["maximize"] = 1, True
        optimizer.step()
        if loads:
            del saved["param_groups"][0]["maximize"]
            optimizer.load_state_dict(saved)
        else:
            del optimizer.param_groups[0]["mine"]
        optimizer.step()
        groups.append(optimizer.state_dict()["param_groups"])
    assert groups[0] == groups[1] and "mine" not in groups[0][0]


@on_ranks(TWO)
def test_training_goes_on_after_a_step_has_failed(here: RankContext) -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(6)]
    with mock.patch.object(sharded_optimizer, "CHUNK_BYTES", 8):  # three chunks
        optimizer = ShardedOptimizer(parameters, torch.optim.Adam, peer_memory=True, lr=0.5)
    for parameter in parameters:
        parameter.grad = torch.ones(2).to_sparse()
    parameters[0].grad = parameters[1].grad = torch.ones(2)  # the first chunk is sent
    with pytest.raises(RuntimeError, match="sparse"):
        optimizer.step()
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    optimizer.step()
    assert_same_on_all_ranks(parameters)
    torch.testing.assert_close(parameters[5].detach(), torch.full((2,), 0.5))


class NoVectors(torch.optim.SGD):
    def add_param_group(self, param_group):
        super().add_param_group(param_group)
        if any(p.dim() == 1 for p in param_group["params"]):
            raise TypeError("no vectors")


@on_ranks(TWO)
def test_all_ranks_refuse_what_one_refuses(here: RankContext) -> None:
    """Also a group that is added. Then, training goes on without it."""
    vector, matrix = (nn.Parameter(torch.ones(2, *more)) for more in ((), (9,)))
    with pytest.raises(ValueError, match="rank 1: TypeError: no vectors"):
        ShardedOptimizer([matrix, vector], NoVectors, lr=1.0)
    optimizer = ShardedOptimizer([matrix], NoVectors, lr=1.0)
    with pytest.raises(ValueError, match="rank 1: TypeError: no vectors"):
        optimizer.add_param_group({"params": [vector]})
    later = nn.Parameter(torch.ones(2, 3))
    optimizer.add_param_group({"params": [later]})
    matrix.grad, later.grad = torch.ones(2, 9), torch.ones(2, 3)
    optimizer.step()
    assert not matrix.any() and not later.any()


@on_ranks(TWO)
def test_hooks_of_states(here: RankContext) -> None:
    """They may return another state, or nothing, as with torch's optimizers."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = ShardedOptimizer(parameters, torch.optim.SGD, lr=1.0)
    calls = []

    def named(_, state):
        return {**state, "name": "mine"}

    def halved(_, state):
        groups = [{**group, "lr": group["lr"] / 2} for group in state["param_groups"]]
        return {**state, "param_groups": groups}

    optimizer.register_state_dict_pre_hook(calls.append)
    optimizer.register_state_dict_post_hook(named)
    optimizer.register_state_dict_post_hook(lambda _, state: calls.append(state["name"]))
    optimizer.register_load_state_dict_pre_hook(halved)
    optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append(state["name"]))
    optimizer.register_load_state_dict_post_hook(calls.append)
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == [optimizer, "mine", "mine", optimizer]
    assert optimizer.param_groups[0]["lr"] == 0.5


class Halving(torch.optim.Optimizer):
    """Optimizer whose step has an argument and which counts steps in its groups and state."""

    def __init__(self, params):
        super().__init__(params, {"count": 0})

    @torch.no_grad()
    def step(self, closure=None, *, times=1):
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                self.state[p]["count"] = group["count"]
                p.div_(2**times)


@on_ranks(TWO, FOUR, GPUS)
def test_closures_and_arguments(here: RankContext) -> None:
    parameters = [nn.Parameter(torch.full((2,), 8.0, device=here.device)) for _ in range(5)]
    optimizer = ShardedOptimizer(parameters, Halving)
    calls = []

    def closure():
        assert torch.is_grad_enabled()
        calls.append(1)
        return 3.0

    assert optimizer.step(closure, times=2) == 3.0 and len(calls) == 1
    assert optimizer.step() is None
    assert all(p.tolist() == [1.0, 1.0] for p in parameters)
    assert optimizer.param_groups[0]["count"] == 2
    assert optimizer.state_dict()["state"] == {i: {"count": 2} for i in range(5)}
    optimizer = ShardedOptimizer(parameters[:1], Halving)
    optimizer.step()
    assert optimizer.state_dict()["param_groups"][0]["count"] == 1  # also where it has no parameter


@on_ranks(TWO, FOUR, GPUS)
def test_what_is_refused(here: RankContext) -> None:
    last = here.rank == here.world_size - 1
    shapes = [(2,), (3 + last,)]
    parameters = [nn.Parameter(torch.zeros(shape, device=here.device)) for shape in shapes]
    message = (
        rf"rank {here.world_size - 1} has parameter 1 of group 0 float32 \(4,\) at position 1, "
        "and rank 0"
    )
    with pytest.raises(ValueError, match=message):
        ShardedOptimizer(parameters, torch.optim.SGD, lr=0.1)
    optimizer = ShardedOptimizer(parameters[:1], torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match=r"must have \[1\] parameters, got \[2\]"):
        optimizer.load_state_dict(torch.optim.SGD(parameters, lr=0.1).state_dict())
    with pytest.raises(ValueError, match=rf"from 0 to {here.world_size - 1}, got -1"):
        optimizer.state_dict(to=-1)
    optimizer.state["steps"] = 1
    with pytest.raises(TypeError, match="got 'steps'"):
        optimizer.state_dict()
    for others in (parameters, parameters[1:]):
        optimizer.param_groups[0]["params"] = others
        with pytest.raises(RuntimeError, match="must not be added"):
            optimizer.step()
    alike = [nn.Parameter(parameters[0].detach().view(shape)) for shape in ((2,), (1, 2))]
    with pytest.raises(ValueError, match="has the memory of"):
        ShardedOptimizer(alike, torch.optim.SGD, lr=0.1)
    empty = [nn.Parameter(torch.zeros(0, device=here.device)) for _ in range(2)]
    ShardedOptimizer(empty, torch.optim.SGD, lr=0.1).step()
    model = nn.Linear(2, 2).to(here.device)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    model.double()
    with pytest.raises(RuntimeError, match="was moved, cast"):
        optimizer.step()
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    model.bias.data = model.bias.data.clone()
    with pytest.raises(RuntimeError, match="given other memory"):
        optimizer.step()
    with pytest.raises(ValueError, match="Invalid learning rate"):
        ShardedOptimizer(parameters[:1], torch.optim.SGD, lr=-1)
    wrapped = PeerDDP(nn.Linear(2, 2).to(here.device), 1)
    wrapped(torch.ones(1, 2, device=here.device)).sum().backward()
    options = {"lr": 0.1, "shard_gradients": wrapped}
    with pytest.raises(ValueError, match="before backward"):
        ShardedOptimizer(wrapped.parameters(), torch.optim.SGD, **options)
    wrapped.zero_grad()
    other = dist.new_group()
    more = [*wrapped.parameters(), parameters[0]]
    for given, group in ((more, None), (wrapped.parameters(), other)):
        with pytest.raises(ValueError, match="with these parameters and this group"):
            ShardedOptimizer(given, torch.optim.SGD, process_group=group, **options)
    with pytest.raises(ValueError, match="weight is missing"):
        ShardedOptimizer([wrapped.module.bias], torch.optim.SGD, **options)
    optimizer = ShardedOptimizer(wrapped.parameters(), torch.optim.SGD, **options)
    with pytest.raises(RuntimeError, match="all groups when you make it"):
        optimizer.add_param_group({"params": parameters[:1]})
    ShardedOptimizer(wrapped.parameters(), torch.optim.SGD, **options)  # replaces the other
    with pytest.raises(ValueError, match="is sharded for another optimizer"):
        ShardedOptimizer(wrapped.parameters(), torch.optim.SGD, lr=0.1)
    dist.destroy_process_group(other)


def test_shares_are_balanced_by_bytes():
    assert balance([1, 1, 1, 9, 1, 5], [0, 0]) == [1, 1, 1, 0, 1, 1]
    assert balance([4], [1, 0, 0]) == [1]
