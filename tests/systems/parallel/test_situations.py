"""Every wrapper goes through the same situations as training in one process."""

from __future__ import annotations

import copy
import itertools
import pickle
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.distributed_c10d import Store, _get_default_store
from torch.nn.parallel import DistributedDataParallel

from systems.parallel import (
    BucketedDDP,
    FullyShardedDataParallel,
    NaiveDDP,
    ShardedOptimizer,
    rank_meetings,
    sharded_optimizer,
)
from tests.systems.parallel.parallel_models import Branches
from tests.systems.parallel.ranks import GPUS, THREE, TWO, RankContext, on_ranks, world
from tests.systems.parallel.situations import (
    OURS,
    SITUATIONS,
    WRAPPERS,
    Failed,
    Net,
    Run,
    Strided,
    collectives,
    compare,
)

# Situations in which a wrapper raises an error, which must have these words.
_FSDP_REFUSES = {
    "deepcopied": "cannot be copied",
    "pickled": "cannot be copied",
    "gradients_set_by_hand": "not have been used",
}
_REFUSED_DURING_BACKWARD = {
    "tied_checkpointed_reentrant": "second gradient in one backward",
    "gradients_edited_by_a_later_hook": "must be called before wrapping",
}
_ADDS_TO_MEANS = (
    "scaled_between_backwards",
    "skipped_batch_zeros",
    "no_sync_skipped_zeros",
    "no_sync_zeroed",
    "accumulated",
    "inputs_differentiated_while_accumulating",
    "two_backwards_of_one_forward",
    "frozen_and_unused",
)
REFUSED = {
    "naive": {},
    "flat": {},
    "fsdp": _FSDP_REFUSES,
    "peer_fsdp": _FSDP_REFUSES,
    "sharded_gradients": {
        **_REFUSED_DURING_BACKWARD,
        **dict.fromkeys(_ADDS_TO_MEANS, "must not add to averaged gradients"),
    },
}
SLOW = ("peer", "peer_optimizer")  # what they do is a part of sharded_gradients, too
CASES = [
    pytest.param(name, situation, marks=[pytest.mark.slow] if name in SLOW else [])
    for situation in SITUATIONS
    for name in OURS
]
# With three ranks, one wrapper of each kind.
ON_THREE = [case for case in CASES if case.values[0] in ("flat", "sharded_optimizer", "fsdp")]


def goes_through(here: RankContext, name: str, situation: str) -> None:
    words = REFUSED.get(name, _REFUSED_DURING_BACKWARD).get(situation)
    if words is None:
        compare(here, WRAPPERS[name], SITUATIONS[situation])
        return
    with pytest.raises((ValueError, TypeError, RuntimeError), match=words):
        SITUATIONS[situation](Run(here, WRAPPERS[name]))


@on_ranks(TWO, GPUS, repeats=1)
@pytest.mark.parametrize(("name", "situation"), CASES)
def test_situation(here, name, situation):
    goes_through(here, name, situation)


@on_ranks(THREE, repeats=1)
@pytest.mark.parametrize(("name", "situation"), ON_THREE)
def test_situation_on_three_ranks(here, name, situation):
    goes_through(here, name, situation)


# By wrapper, in a step. In each, the ranks tell each other once which parameters they have used.
COLLECTIVES = {
    "naive": 1 + 6,  # one for each parameter
    "flat": 1 + 1,
    "overlapped": 1 + 6,
    "bucketed": 1 + 2,
    "peer": 1,
    "sharded_optimizer": 1 + 2 + 2,  # a broadcast by each rank
    "peer_optimizer": 1 + 2,
    "sharded_gradients": 1,
    "fsdp": 1 + 5 + 3 + 1,  # gathers, of the last layer in forward only; the biases are replicated
    "peer_fsdp": 1 + 1,
}


@on_ranks(TWO, repeats=1)
@pytest.mark.parametrize(("name", "count"), COLLECTIVES.items())
def test_collectives_of_a_step(here, name, count):
    run = Run(here, WRAPPERS[name])
    run.make()
    run.train(0)
    before = collectives()
    run.train(1)
    assert collectives() - before == count


# ---- ranks without a batch -----------------------------------------------------------------------


def missing_batches(
    run: Run,
    set_to_none: bool = True,
    build: Callable[[], nn.Module] = Net,
    evaluate: str = "",
    zeros: bool = False,
) -> None:
    """Train 4 steps. From the second on, another rank in turn has no batch, and only finishes.

    With zeros, it sets gradients to zeros before.
    """
    run.make(build)
    for step in range(4):
        run.zero_grad(set_to_none)
        absent = step % run.here.world_size if step else None
        if run.alone:
            kept = [(buffer, buffer.clone()) for buffer in run.made.buffers() if absent == 0]
            for rank, loss in enumerate(run.losses(step)):
                if rank != absent:
                    (loss / run.here.world_size).backward()
            for buffer, value in kept:
                buffer.copy_(value)
        elif run.here.rank == absent:
            for parameter in run.model.parameters() if zeros else ():
                parameter.grad = torch.zeros_like(parameter)
            run.finish()
        else:
            run.backward(step)
        run.optimizer.step()
        if evaluate or step == 3:  # then all ranks have the buffers of the first
            run.model.train(evaluate == "in training mode" and step < 3)
            with torch.no_grad():
                run.losses(step)
            run.model.train()


@on_ranks(THREE, repeats=1)
@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("name", ["naive", "flat", "overlapped", "bucketed", "peer"])
def test_a_rank_without_a_batch_adds_zeros(here, name, set_to_none):
    compare(here, WRAPPERS[name], partial(missing_batches, set_to_none=set_to_none))


@on_ranks(THREE, repeats=1)
@pytest.mark.parametrize("name", ["bucketed", "sharded_gradients"])
def test_a_rank_without_a_batch_may_set_zeros(here, name):
    compare(here, WRAPPERS[name], partial(missing_batches, zeros=True))


@on_ranks(THREE, repeats=1)
def test_a_rank_that_owns_nothing_may_have_no_batch(here):
    """Its step before was averaged, too, which must not count for this one."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 1))

    situation = partial(missing_batches, build=build)
    compare(here, WRAPPERS["sharded_gradients"], situation)


@on_ranks(THREE, repeats=1)
@pytest.mark.parametrize("evaluate", ["", "in evaluation mode", "in training mode"])
@pytest.mark.parametrize("name", ["naive", "bucketed", "peer"])
def test_a_rank_without_a_batch_takes_part_in_the_broadcast_of_buffers(here, name, evaluate):
    situation = partial(missing_batches, evaluate=evaluate)
    compare(here, WRAPPERS[name], partial(situation, build=lambda: Net(nn.BatchNorm1d(6))))


@on_ranks(TWO, GPUS, repeats=1)
@pytest.mark.parametrize("name", ["naive", "fsdp"])
def test_only_persistent_buffers_are_those_of_the_first_rank(here, name):
    layer = nn.Linear(3, 3).to(here.device)
    for buffer, is_persistent in (("kept", True), ("own", False)):
        layer.register_buffer(buffer, torch.zeros(1, device=here.device), is_persistent)
    wrapped = WRAPPERS[name].wrap(layer)
    layer.kept += here.rank
    layer.own += here.rank
    wrapped(torch.ones(2, 3, device=here.device))
    assert (layer.kept.item(), layer.own.item()) == (0, here.rank)


# ---- changes after wrapping ----------------------------------------------------------------------


def _fail(*_: object) -> None:
    raise Failed


CHANGES: dict[str, Callable[[Run], Any]] = {
    "freeze": lambda run: run.made.middle.requires_grad_(False),
    "cast": lambda run: run.made.middle.double(),
    "replace a module": lambda run: setattr(run.made, "middle", nn.Linear(6, 6)),
    "replace a parameter": lambda run: setattr(run.made.last, "bias", nn.Parameter(torch.ones(1))),
    "remove a parameter": lambda run: setattr(run.made.last, "bias", None),
    "add a module": lambda run: run.made.middle.add_module("more", nn.Linear(6, 6)),
    "assign": lambda run: run.model.load_state_dict(run.model.state_dict(), assign=True),
    "replace the wrapped module": lambda run: setattr(run.model, "module", Net()),
}


@on_ranks(TWO, GPUS, repeats=1)
@pytest.mark.parametrize("name", OURS)
def test_a_wrapper_stays_as_it_was_made(here: RankContext, name: str) -> None:
    for what, change in CHANGES.items():
        run = Run(here, WRAPPERS[name])
        run.make()
        run.train(0)
        assign_to_shards = what == "assign" and "fsdp" in name
        with pytest.raises((RuntimeError, TypeError), match=r"after wrapping|assign=True") as told:
            change(run)
            with torch.set_grad_enabled(what != "cast"):
                run.losses(1)
        assert told.type is (TypeError if assign_to_shards else RuntimeError), what
    run = Run(here, WRAPPERS[name])
    run.make()
    for copy_of in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copy_of(run.model)
    with pytest.raises(ValueError, match=r"first.weight is already (averaged|sharded) by a "):
        NaiveDDP(run.made)
    if "fsdp" in name:
        run.made.first.weight.register_hook(_fail)
        with pytest.raises(RuntimeError, match="do not run for parameters of FSDP"):
            run.train(0)


@on_ranks(TWO, GPUS, repeats=1)
@pytest.mark.parametrize("name", OURS)
def test_a_wrapper_ends_with_an_error(here: RankContext, name: str) -> None:
    """After an exception on all ranks, only the state can be used."""
    for phase in ("forward", "backward", "backward under no_sync", "an earlier backward"):
        run = Run(here, WRAPPERS[name])
        run.make()
        run.train(0)
        run.zero_grad()
        losses = run.losses(2)
        run.made.at_middle = _fail if phase == "forward" else lambda x: x.register_hook(_fail)
        with pytest.raises(Failed), run.no_sync("no_sync" in phase):
            run.backward(1)
        run.made.at_middle = lambda x: None
        run.zero_grad()
        again = {"an earlier backward": losses[0].backward, "backward": run.finish}
        with pytest.raises(RuntimeError, match=r"ended with an error; make a new wrapper"):
            again.get(phase, partial(run.train, 3))()
        with pytest.raises(RuntimeError, match=r"ended with an error; make a new wrapper"):
            run.train(3)
        if "fsdp" in name and phase == "backward":
            with pytest.raises(RuntimeError, match="ended with an error"):
                run.made.last(run.shares(3)[0])
        new = Net().to(here.device)
        new.load_state_dict(run.model.state_dict())
        assert all(parameter.isfinite().all() for parameter in new.parameters())


# ---- wraps that make no sense --------------------------------------------------------------------

DOUBLE_WRAPS: dict[str, Callable[[nn.Module], Any]] = {
    "ddp in ddp": lambda m: NaiveDDP(BucketedDDP(m, 1)),
    "fsdp in fsdp": lambda m: FullyShardedDataParallel(FullyShardedDataParallel(m)),
    "fsdp of an fsdp module": lambda m: FullyShardedDataParallel(
        FullyShardedDataParallel(m).module
    ),
    "fsdp in ddp": lambda m: NaiveDDP(FullyShardedDataParallel(m)),
    "torch's ddp in ours": lambda m: NaiveDDP(DistributedDataParallel(m)),
    "a part and the whole": lambda m: (NaiveDDP(m.first), NaiveDDP(m)),
    "the whole and a part": lambda m: (kept := NaiveDDP(m), NaiveDDP(m.first), kept),
    "sharded optimizer of shards": lambda m: ShardedOptimizer(
        FullyShardedDataParallel(m).parameters(), torch.optim.Adam
    ),
}


@on_ranks(TWO, GPUS, repeats=1)
def test_double_wraps_are_refused(here: RankContext) -> None:
    for name, wrap in DOUBLE_WRAPS.items():
        with pytest.raises(ValueError, match=r"rank 0: .*(cannot be wrapped|is already)"):
            wrap(Net().to(here.device))
            raise AssertionError(f"{name} was not refused")
    # On one rank only, and before anything is broadcast.
    torch.manual_seed(here.rank)
    wrapped, model = NaiveDDP(Net().to(here.device)), Net().to(here.device)
    before = model.first.weight.detach().clone()
    with pytest.raises(ValueError, match=r"rank 0: .*cannot be wrapped"):
        NaiveDDP(wrapped if here.rank == 0 else model)
    assert torch.equal(model.first.weight, before)


# ---- ranks that differ ---------------------------------------------------------------------------


def ranks_run_different_layers(
    here: RankContext, first: list[list[int]], then: list[list[int]], whole: bool
) -> None:
    """All ranks may run other layers, or parts of a whole layer, than before, but not different."""
    layers = (Branches,) if whole else ()
    wrapped = FullyShardedDataParallel(Branches().to(here.device), layers=layers)
    x = torch.ones(2, 3, device=here.device)
    for used in first:
        wrapped(x, used).sum().backward()
    _impatient_store()
    try:
        wrapped(x, then[here.rank]).sum().backward()
    except RuntimeError as error:
        words = str(error)
    else:
        words = "no error"
    raise Failed(words)


@pytest.mark.parametrize(
    ("first", "then"),
    [([], [[0, 1], [0, 2]]), ([[0, 1, 2], [0, 2], [0, 1, 2]], [[0, 1, 2], [0, 2]])],
    ids=["first_pass", "later_pass"],
)
@pytest.mark.parametrize("whole", [False, True], ids=["layers", "parts_of_a_layer"])
def test_an_error_names_the_rank_and_the_layer(first, then, whole):
    with world("gloo", 2) as ranks:
        outcomes = ranks.outcomes(ranks_run_different_layers, first=first, then=then, whole=whole)
    told = [o.rpartition("Failed: ")[2] for o in outcomes]
    assert any("layers.2" in words and "rank" in words for words in told), told
    assert not any("no error" in words for words in told), told


class Forked(nn.Module):
    """A model with two outputs, of different frozen layers, which have no gradients to compare."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = (nn.Linear(3, 3) for _ in range(3))
        self.left.requires_grad_(False)
        self.right.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = self.first(x)
        return [self.left(x), self.right(x)]


def ranks_differentiate_different_outputs(here: RankContext, passes: int) -> None:
    wrapped = FullyShardedDataParallel(Forked())
    x = torch.ones(2, 3)
    for _ in range(passes):
        torch.stack(wrapped(x)).sum().backward()
    _impatient_store()
    with pytest.raises(RuntimeError) as told:
        wrapped(x)[here.rank].sum().backward()
    raise Failed(str(told.value))


@pytest.mark.parametrize("passes", [0, 2])
def test_an_error_names_the_layer_of_backward(passes):
    with world("gloo", 2) as ranks:
        outcomes = ranks.outcomes(ranks_differentiate_different_outputs, passes=passes)
    assert any("left" in words and "right" in words for words in outcomes), outcomes


@on_ranks(TWO, repeats=1)
def test_passes_over_the_same_layers_send_no_messages(here):
    run = Run(here, WRAPPERS["fsdp"])
    run.make()
    run.train(0)
    written = _get_default_store().num_keys()
    run.train(1)
    assert _get_default_store().num_keys() == written


def fails_on_one_rank(here: RankContext, name: str, phase: str) -> None:
    sharded_optimizer.CHUNK_BYTES = 100  # several chunks
    run = Run(here, WRAPPERS[name])
    run.make()
    run.train(0)
    if here.rank == 1 and phase == "step":
        mine = [c.optimizer for c in run.optimizer._chunks if c.optimizer is not None]
        assert len(mine) > 1
        mine[-1].register_step_pre_hook(_fail)  # runs when the first chunk has been sent
    elif here.rank == 1:
        run.made.at_middle = _fail if phase == "forward" else lambda x: x.register_hook(_fail)
    run.train(1)


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        *itertools.product(("naive", "bucketed", "fsdp"), ("forward", "backward")),
        ("sharded_optimizer", "step"),
    ],
)
def test_an_exception_on_one_rank_ends_the_others(name, phase):
    start = time.monotonic()
    with world("gloo", 2, timeout_s=20) as ranks:
        outcomes = ranks.outcomes(fails_on_one_rank, name=name, phase=phase)
    assert "Failed" in outcomes[1] and "RuntimeError" in outcomes[0], outcomes
    assert time.monotonic() - start < 60


LONE_CALLS = {
    "fsdp": lambda m: FullyShardedDataParallel(m).state_dict,
    "full_parameters": lambda m: FullyShardedDataParallel(m).gather_full_parameters,
    "optimizer": lambda m: ShardedOptimizer(m.parameters(), torch.optim.Adam).state_dict,
}


def lone_call(here: RankContext, name: str) -> None:
    call = LONE_CALLS[name](Net())
    store = _impatient_store()
    if here.rank == 1:
        store.wait(["over"], timedelta(seconds=60))
        return
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(RuntimeError, match=r"rank 0 waits in .* for ranks \[1\]"):
            call()
    assert "for ranks [1]" in str(told[0].message)
    store.set("over", "")


def _impatient_store() -> Store:
    """Let ranks wait for others outside collectives for a second only. Return the store."""
    rank_meetings.PATIENCE_S = 0.5
    store = _get_default_store()
    store.set_timeout(timedelta(seconds=1))
    return store


@pytest.mark.parametrize(
    "name", ["fsdp", *(pytest.param(n, marks=pytest.mark.slow) for n in list(LONE_CALLS)[1:])]
)
def test_a_call_that_not_all_ranks_make_says_so(name):
    with world("gloo", 2) as ranks:
        ranks.assert_passes(lone_call, name=name)


ENDS = """
import os, weakref, torch, torch.distributed as dist
from pathlib import Path
from systems.parallel import *

def loops():
    tasks = Path("/proc/self/task").iterdir()
    return sum("gloo_runloop" in (task / "comm").read_text() for task in tasks)

os.environ |= {{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}}
os.environ["MASTER_PORT"] = "0"
with process_group("gloo"):
    group = weakref.ref(dist.group.WORLD)
    given = {given}
    model = {wrap}
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    assert loops() > 0
assert group() is None, "the process group is alive"
assert loops() == 0, "threads of Gloo are alive"
"""


@pytest.mark.parametrize(
    "given", ["None", pytest.param("dist.new_group()", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "name",
    [
        "FullyShardedDataParallel",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("NaiveDDP", "BucketedDDP")),
    ],
)
def test_no_thread_of_gloo_outlives_the_process_group(name, given):
    arguments = "torch.nn.Linear(3, 3), process_group=given"
    wrap = f"{name}({arguments}{', bucket_size_mb=1' if name == 'BucketedDDP' else ''})"
    script = ENDS.format(given=given, wrap=f"{wrap}; del given")
    subprocess.run([sys.executable, "-c", script], check=True)


# ---- checkpoints ---------------------------------------------------------------------------------


def with_strides() -> nn.Module:
    return Net(Strided(2))


def saves(here: RankContext, name: str, folder: Path) -> None:
    """Train two steps, and save the model and the optimizer after the first."""
    run = Run(here, WRAPPERS[name])
    run.make(with_strides)
    run.train(0)
    saved = _state(run)
    states = saved[1]["state"].values() if saved[1] else ()
    for state, parameter in zip(states, run.new(with_strides).parameters(), strict=False):
        assert state["exp_avg"].stride() == parameter.stride()  # a fused optimizer relies on it
    dcp.save({"model": saved[0]}, checkpoint_id=folder / "dcp")
    if here.rank == 0:
        torch.save(saved, folder / "saved")
    run.train(1)
    values = run.values()
    if here.rank == 0:
        torch.save(values, folder / "values")


def loads(here: RankContext, name: str, folder: Path) -> None:
    """Load what `saves` saved with another wrapper and number of ranks, and train the next step."""
    run = Run(here, WRAPPERS[name])
    run.make(with_strides)
    model, optimizer = torch.load(folder / "saved")
    target = {"model": {name: torch.zeros_like(value) for name, value in model.items()}}
    dcp.load(target, checkpoint_id=folder / "dcp")
    model = target["model"]
    if isinstance(run.model, DistributedDataParallel):
        model = {f"module.{name}": value for name, value in model.items()}
    run.model.load_state_dict(model)
    if isinstance(run.model, FullyShardedDataParallel):
        run.model.load_optimizer_state_dict(run.optimizer, optimizer)
    else:
        run.optimizer.load_state_dict(optimizer)
    run.train(1)
    torch.testing.assert_close(run.values(), torch.load(folder / "values"), atol=1e-6, rtol=1e-6)


def _state(run: Run) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    model = {n.removeprefix("module."): v for n, v in run.model.state_dict().items()}
    if isinstance(run.model, FullyShardedDataParallel):
        return model, run.model.optimizer_state_dict(run.optimizer)
    if isinstance(run.optimizer, torch.distributed.optim.ZeroRedundancyOptimizer):
        run.optimizer.consolidate_state_dict(0)
        return model, run.optimizer.state_dict() if run.here.rank == 0 else {}
    return model, run.optimizer.state_dict()


CHECKPOINTS = [
    ("fsdp", 2, "bucketed", 1),
    ("fsdp", 2, "fsdp", 4),
    ("bucketed", 1, "fsdp", 2),
    ("sharded_optimizer", 2, "fsdp", 1),
    ("sharded_optimizer", 2, "torch_ddp", 4),
    ("torch_zero", 2, "sharded_optimizer", 4),
    ("torch_ddp", 1, "sharded_optimizer", 2),
    ("fsdp", 2, "torch_zero", 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("saved_by", "size", "loaded_by", "new_size"), CHECKPOINTS)
def test_a_checkpoint_of_another_wrapper_is_loaded(
    worlds, tmp_path, saved_by, size, loaded_by, new_size
):
    worlds("gloo", size).assert_passes(saves, name=saved_by, folder=tmp_path)
    worlds("gloo", new_size).assert_passes(loads, name=loaded_by, folder=tmp_path)
