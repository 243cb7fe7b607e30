"""FSDP on 2 and 4 ranks: blocks, checkpoints, 16 bits, and when weights are whole.

test_situations.py trains small models in many ways.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from systems import checkpointing
from systems.model import TransformerBlock
from systems.parallel import FullyShardedDataParallel
from systems.parallel.fsdp import has_matrix
from tests.systems.parallel.parallel_models import (
    assert_same_on_all_ranks,
    assert_steps_never_wait,
    batch,
    build,
    loss_of,
    train,
)
from tests.systems.parallel.ranks import FOUR, GPUS, TWO, RankContext, on_ranks

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01)
# Limit of the relative L2 error of the change of the weights in three steps, compared to float32.
# It is 16 unit roundoffs, because a step rounds weights, activations, gradients and their means.
CHANGED = {torch.bfloat16: 16 * 2**-8, torch.float16: 16 * 2**-11}
BLOCKS = {"layers": (TransformerBlock,)}


def _reentrant(blocks, x):
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=True)
    return x


POLICIES = {
    "every_block": checkpointing.every_k_blocks(1),
    "every_two": checkpointing.every_k_blocks(2),
    "nested": checkpointing.nested(),
    "selective": checkpointing.selective(),
    "reentrant": _reentrant,
}


def _step(here, wrapped, optimizer, name, step):
    train(here, wrapped, optimizer, name, [step])
    for p in wrapped.parameters():
        assert p.dtype == torch.float32
        if p.grad is not None:
            assert p.grad.shape == p.shape and p.grad.dtype == torch.float32
    assert not any(weight.gathered for weight in wrapped._weights)


def _assert_whole_is(wrapped, reference, tolerance):
    gathered = wrapped.gather_full_parameters().items()
    whole = {name.replace("_orig_mod.", ""): p for name, p in gathered}  # of compiled blocks
    expected = dict(reference.named_parameters(remove_duplicate=False))
    assert list(whole) == list(expected)
    torch.testing.assert_close(whole, expected, atol=tolerance, rtol=tolerance)
    assert_same_on_all_ranks(whole.values())
    keys = reference.load_state_dict(whole, strict=False)
    assert not keys.unexpected_keys and not keys.missing_keys
    slices = {weight.shard for weight in wrapped._weights}
    assert_same_on_all_ranks(p for p in wrapped.parameters() if p not in slices)


def use_policy(policy: str, model: nn.Module) -> None:
    model.apply_blocks = POLICIES[policy]


def freeze_blocks(model: nn.Module) -> None:
    for p in model.blocks.parameters():
        p.requires_grad_(False)


def compile_blocks(model: nn.Module) -> None:
    for block in model.blocks:
        block.compile(fullgraph=True, backend="aot_eager")


def wrap_compiled_blocks(model: nn.Module) -> None:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, fullgraph=True, backend="aot_eager")


def trains_as_one_process(
    here: RankContext, name: str, options: dict, change=None, frozen=False
) -> None:
    reference = build(name, 0, here.device)
    model = build(name, here.rank, here.device)
    if frozen:
        freeze_blocks(model)
        freeze_blocks(reference)
    if change is not None:
        change(model)
    wrapped = FullyShardedDataParallel(model, **options)
    ours, theirs = SGD(wrapped.parameters()), SGD(reference.parameters())
    for step in range(3):  # prefetching in forward starts in the second
        _step(here, wrapped, ours, name, step)
    train(here, reference, theirs, name, range(3))
    for p, q in zip(wrapped.parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
    _assert_whole_is(wrapped, reference, here.tolerance)
    with torch.no_grad():
        x, _ = batch(name, 99, here.device)
        torch.testing.assert_close(wrapped(x), reference(x), atol=1e-5, rtol=1e-5)
    assert not any(weight.gathered for weight in wrapped._weights)


TRAININGS = {  # policy of checkpointing, options, and whether gradients pass through frozen blocks
    "layers": (None, {}, False),
    "blocks": (None, BLOCKS, False),
    "frozen": (None, {}, True),
    "frozen_every_block": ("every_block", {}, True),
    "blocks_every_block": ("every_block", BLOCKS, False),
    "every_two": ("every_two", {}, False),
    "blocks_nested": ("nested", BLOCKS, False),
    "blocks_selective": ("selective", BLOCKS, False),
    "reentrant": ("reentrant", {}, False),
}


@on_ranks(TWO, GPUS)
@pytest.mark.parametrize("name", TRAININGS)
def test_trains_as_one_process(here, name):
    policy, options, frozen = TRAININGS[name]
    change = policy and partial(use_policy, policy)
    trains_as_one_process(here, "transformer", options, change, frozen)


@on_ranks(FOUR)
@pytest.mark.parametrize(
    ("model", "options"), [("tied", {}), ("transformer", BLOCKS)], ids=["layers", "blocks"]
)
def test_four_ranks_train_as_one_process(here, model, options):
    trains_as_one_process(here, model, options)


@on_ranks(TWO, GPUS, repeats=1)
@pytest.mark.slow
@pytest.mark.depends
@pytest.mark.parametrize("change", [compile_blocks, wrap_compiled_blocks])
def test_trains_as_one_process_with_compiled_blocks(here, change):
    """A block whose layers were gathered one by one would not be a single graph."""
    trains_as_one_process(here, "transformer", {}, change)


@on_ranks(TWO, GPUS)
@pytest.mark.parametrize(
    ("name", "dtype", "options", "cast"),
    [
        ("toy", torch.bfloat16, {}, False),
        ("transformer", torch.bfloat16, BLOCKS, False),
        ("tied", torch.bfloat16, {}, True),
        ("tied", torch.float16, {}, False),
    ],
    ids=["toy", "blocks", "module_in_bf16", "tied_fp16"],
)
def test_in_16_bits(here, name, dtype, options, cast):
    """Shards are float32, with compute_dtype and with a module that was cast before wrapping."""
    reference = build(name, 0, here.device)
    if cast:
        reference.to(dtype).float()  # start from the rounded weights of the cast module
    start = [p.detach().clone() for p in reference.parameters()]
    model = build(name, here.rank, here.device)
    if cast:
        wrapped = FullyShardedDataParallel(model.to(dtype), **options)
    else:
        wrapped = FullyShardedDataParallel(model, compute_dtype=dtype, **options)
    ours, theirs = SGD(wrapped.parameters()), SGD(reference.parameters())
    for step in range(3):
        _step(here, wrapped, ours, name, step)
    train(here, reference, theirs, name, range(3))
    whole = wrapped.gather_full_parameters()
    assert_same_on_all_ranks(whole.values())
    error, moved = 0.0, 0.0
    for (key, q), before in zip(reference.named_parameters(), start, strict=True):
        assert whole[key].dtype == torch.float32
        error += float((whole[key] - q).square().sum())
        moved += float((q - before).square().sum())
    assert 0 < error <= CHANGED[dtype] ** 2 * moved, (error / moved) ** 0.5
    x, _ = batch(name, 99, here.device)
    assert wrapped(x).dtype == dtype


@on_ranks(TWO, GPUS)
@pytest.mark.parametrize(
    ("policy", "dtype", "frozen"),
    [
        (None, None, False),
        (None, None, True),
        ("every_two", torch.bfloat16, False),
        ("nested", None, False),
    ],
    ids=["fp32", "frozen_blocks", "every_two_bf16", "nested"],
)
def test_weights_are_whole_only_around_their_layer(here, policy, dtype, frozen):
    model = build("transformer", 0, here.device)
    if frozen:
        freeze_blocks(model)
    if policy is not None:
        use_policy(policy, model)
    matrices = {name: m for name, m in model.named_modules() if has_matrix(m)}
    wrapped = FullyShardedDataParallel(model, compute_dtype=dtype)
    seen = {"forward": [], "recomputed": [], "backward": []}
    phase = "forward"

    def count(phase, *_):
        seen[phase].append(sum(weight.gathered for weight in wrapped._weights))

    for module in matrices.values():
        # prepend: count before the hook of the layer frees its weights.
        module.register_forward_hook(lambda *_: count(phase), prepend=True)
        module.register_full_backward_hook(lambda *_: count("backward"))
    for step in range(2):
        for counts in seen.values():
            counts.clear()
        phase = "forward"
        loss = loss_of(wrapped, *batch("transformer", step, here.device))
        phase = "recomputed"
        loss.backward()
        # The running layer and, once the order of layers is known, the next two.
        assert max(seen["forward"]) == (3 if step else 1)
        # Backward has just freed a layer, or has reached the first of the recomputed layers.
        assert max(seen["backward"]) <= 3
        assert max(seen["recomputed"], default=0) <= 6
        assert bool(seen["recomputed"]) == (policy is not None)
        wrapped.finish_gradient_synchronization()
        assert not any(weight.gathered for weight in wrapped._weights)
    sizes = torch.tensor([module.weight.numel() for module in matrices.values()])
    sizes = sizes.to(here.device)
    torch.distributed.all_reduce(sizes)
    whole = wrapped.gather_full_parameters()
    assert sizes.tolist() == [whole[f"{name}.weight"].numel() for name in matrices]


class Odd(nn.Module):
    """Model with weights of fewer elements than ranks, a layer that is called twice, and a layer
    that is not used in every step.
    """

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(1, 1)
        self.twice = nn.Linear(3, 3)
        self.sometimes = nn.Linear(3, 3)
        self.last = nn.Linear(3, 1, bias=False)

    def forward(self, x, *, more):
        x = self.twice(self.twice(self.one(x[:, :1]) + x))
        return self.last(self.sometimes(x) if more else x)


@on_ranks(TWO, FOUR, GPUS, repeats=1)  # on four, most weights have fewer rows than there are ranks
@pytest.mark.parametrize("options", [{}, {"layers": (Odd,)}], ids=["layers", "whole"])
def test_odd_layers(here, options):
    torch.manual_seed(0)
    reference = Odd().to(here.device)
    torch.manual_seed(here.rank)
    wrapped = FullyShardedDataParallel(Odd().to(here.device), **options)
    ours = torch.optim.Adam(wrapped.parameters(), lr=1e-2, eps=1e-2)
    theirs = torch.optim.Adam(reference.parameters(), lr=1e-2, eps=1e-2)
    for step, more in enumerate([True, False, True, True]):
        x = torch.randn(8, 3, generator=torch.Generator().manual_seed(step)).to(here.device)
        for model, optimizer in ((wrapped, ours), (reference, theirs)):
            optimizer.zero_grad()
            mine = x.chunk(here.world_size)[here.rank] if model is wrapped else x
            # Two forward passes before one backward pass.
            (model(mine, more=more).mean() + model(mine * 2, more=not more).mean()).backward()
            if model is wrapped:
                wrapped.finish_gradient_synchronization()
            optimizer.step()
        wrapped(x, more=more)  # a forward with a graph but without a backward
    _assert_whole_is(wrapped, reference, here.tolerance)


@on_ranks(GPUS)
@pytest.mark.parametrize(
    "options",
    [{}, {"compute_dtype": torch.bfloat16}, {"compute_dtype": torch.bfloat16, **BLOCKS}],
    ids=["fp32", "bf16", "bf16_blocks"],
)
def test_a_step_never_waits_for_the_device(here, options):
    wrapped = FullyShardedDataParallel(build("transformer", 0, here.device), **options)
    optimizer = torch.optim.AdamW(wrapped.parameters(), fused=True)
    assert_steps_never_wait(here, wrapped, optimizer)
