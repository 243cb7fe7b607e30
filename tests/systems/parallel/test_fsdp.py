"""FSDP on 2 and 4 ranks: blocks, checkpoints, 16 bits, and when weights are whole.

test_situations.py trains small models in many ways.
"""

from __future__ import annotations

from functools import partial
from time import sleep
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from systems import checkpointing
from systems.model import TransformerBlock, TransformerLM, cross_entropy
from systems.parallel import FullyShardedDataParallel, peer_memory
from systems.parallel.fsdp import has_matrix
from tests.systems.parallel.parallel_models import (
    BATCH,
    VOCABULARY,
    WIDTH,
    Branches,
    Tied,
    Toy,
    assert_same_on_all_ranks,
    transformer,
)
from tests.systems.parallel.ranks import FOUR, GPUS, TWO, RankContext, on_ranks
from tests.systems.parallel.situations import Net, Run, Wrapper, compare, plain

# Limit of the relative L2 error of the change of the weights in three steps, compared to float64.
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


def fsdp(**options: Any) -> Wrapper:
    return Wrapper(partial(FullyShardedDataParallel, **options))


def loss_of_tokens(model: Any, x: Tensor) -> Tensor:
    tokens = (100 * x.float()).long() % VOCABULARY
    return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])


def model(policy: str | None = None, frozen: bool = False) -> TransformerLM:
    """Return a Transformer that uses a policy of checkpointing, and may have frozen blocks."""
    made = transformer()
    made.blocks.requires_grad_(not frozen)
    if policy is not None:
        made.apply_blocks = POLICIES[policy]
    return made


def compiled(in_place: bool) -> TransformerLM:
    made = transformer()
    for i, block in enumerate(made.blocks):
        if in_place:
            block.compile(fullgraph=True, backend="aot_eager")
        else:
            made.blocks[i] = torch.compile(block, fullgraph=True, backend="aot_eager")
    return made


def tied_in_bf16() -> Tied:
    return Tied().bfloat16()


def assert_is_sharded(run: Run) -> None:
    """Check what is true between steps: parameters are float32, and no weight is whole."""
    if run.alone:
        return
    for p in run.model.parameters():
        assert p.dtype == torch.float32
        assert p.grad is None or (p.grad.shape == p.shape and p.grad.dtype == torch.float32)
    assert not any(weight.gathered for weight in run.model._weights)


def trains(run: Run, build: Any) -> None:
    """Train three steps, because prefetching in forward starts in the second, and evaluate."""
    run.make(build)
    for step in range(3):
        run.train(step, loss_of_tokens)
        assert_is_sharded(run)
    with torch.no_grad():
        x = torch.eye(WIDTH, device=run.here.device)
        run.results.append(loss_of_tokens(run.model, x))
    assert_is_sharded(run)


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
    compare(here, fsdp(**options), partial(trains, build=partial(model, policy, frozen)))


@on_ranks(FOUR)
@pytest.mark.parametrize(
    ("build", "options"), [(Tied, {}), (transformer, BLOCKS)], ids=["layers", "blocks"]
)
def test_four_ranks_train_as_one_process(here, build, options):
    compare(here, fsdp(**options), partial(trains, build=build))


@on_ranks(TWO, GPUS, repeats=1)
@pytest.mark.slow
@pytest.mark.depends
@pytest.mark.parametrize("in_place", [True, False])
def test_trains_as_one_process_with_compiled_blocks(here, in_place):
    """A block whose layers were gathered one by one would not be a single graph."""
    compare(here, fsdp(), partial(trains, build=partial(compiled, in_place)))


@on_ranks(TWO, GPUS, repeats=1)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_full_parameters(here: RankContext, dtype: torch.dtype | None) -> None:
    """Each name of a tied parameter has its value, as in the state dict, which is on the CPU."""
    run = Run(here, fsdp(compute_dtype=dtype))
    run.make(Tied)
    run.train(0, loss_of_tokens)
    whole = run.model.gather_full_parameters()
    assert list(whole) == [name for name, _ in Tied().named_parameters(remove_duplicate=False)]
    on_cpu = {name: value.cpu() for name, value in whole.items()}
    torch.testing.assert_close(on_cpu, dict(run.model.state_dict()), atol=0, rtol=0)
    assert_is_sharded(run)


@on_ranks(TWO, GPUS, repeats=1)
def test_the_state_is_gathered_on_one_rank(here):
    run = Run(here, fsdp())
    run.make()
    run.train(0)
    model, optimizer = run.model.state_dict(), run.model.optimizer_state_dict(run.optimizer)
    with pytest.raises(ValueError, match=f"got {here.world_size}"):
        run.model.state_dict(to=here.world_size)
    for rank in range(here.world_size):
        wanted = here.rank == rank
        only = run.model.state_dict(to=rank), run.model.optimizer_state_dict(run.optimizer, to=rank)
        expected = (model, optimizer) if wanted else ({}, {**optimizer, "state": {}})
        torch.testing.assert_close(only, expected, atol=0, rtol=0)
    assert optimizer["state"]
    torch.testing.assert_close(run.model.module.state_dict(), model, atol=0, rtol=0)


class Scaled(nn.Module):
    """A layer without a sharded weight, which checkpoints a part of itself.

    It also reads a parameter of a module that is not called.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.more = nn.ParameterList([torch.ones(WIDTH)])

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._part, x, use_reentrant=False)

    def _part(self, x: Tensor) -> Tensor:
        return torch.tanh(self.scale * self.more[0] * x)


class Recomputed(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: torch.tanh(self.module(x)), x, use_reentrant=False)


def scaled() -> nn.Module:
    return Net(nn.Sequential(Scaled(), Recomputed(Scaled())))


@on_ranks(TWO, GPUS)
@pytest.mark.parametrize(
    ("build", "of", "dtype", "options"),
    [
        (Toy, None, torch.bfloat16, {}),
        (scaled, None, torch.bfloat16, {}),
        (transformer, loss_of_tokens, torch.bfloat16, BLOCKS),
        (tied_in_bf16, loss_of_tokens, None, {}),
        (Tied, loss_of_tokens, torch.float16, {}),
    ],
    ids=["toy", "checkpoints", "blocks", "module_in_bf16", "tied_fp16"],
)
def test_in_16_bits(here, build, of, dtype, options):
    """Shards are float32, with compute_dtype and with a module that was cast before wrapping."""
    ours, alone = Run(here, fsdp(compute_dtype=dtype, **options)), Run(here, None)
    for run in (ours, alone):
        run.make(build)
        run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1, momentum=0.9)
        start = run.values()
        for step in range(3):
            run.train(step, of)
            assert_is_sharded(run)
    trained, expected = ours.values(), alone.values()
    assert_same_on_all_ranks(value.to(here.device) for value in trained.values())
    error = sum((trained[name] - value).square().sum() for name, value in expected.items())
    moved = sum((value - start[name]).square().sum() for name, value in expected.items())
    computed = dtype or torch.bfloat16
    assert 0 < error <= CHANGED[computed] ** 2 * moved, (error / moved) ** 0.5
    outputs = []
    ours.model.register_forward_hook(lambda _, inputs, output: outputs.append(output.dtype))
    ours.losses(99, of)
    assert outputs == [computed]


@on_ranks(TWO, GPUS, repeats=1)
def test_parameters_are_float32_after_a_backward_that_reaches_none(here):
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    wrapped = FullyShardedDataParallel(layers.to(here.device), compute_dtype=torch.bfloat16)
    x = torch.ones(2, WIDTH, device=here.device)
    output = wrapped(x)
    torch.autograd.grad(output.sum(), output)
    assert {p.dtype for p in wrapped.parameters()} == {torch.float32}
    wrapped(x).sum().backward()


@on_ranks(TWO, GPUS, repeats=1)
def test_hooks_of_gradients_run_once_on_float32(here):
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)).to(here.device)
    wrapped = FullyShardedDataParallel(layers, compute_dtype=torch.bfloat16)
    seen = []
    for p in wrapped.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append((id(p), p.grad.dtype)))
    wrapped(torch.ones(2, WIDTH, device=here.device)).sum().backward()
    assert sorted(seen) == sorted((id(p), torch.float32) for p in wrapped.parameters())


@on_ranks(TWO, GPUS, repeats=1)
@pytest.mark.parametrize("use", ["state_dict", "load_state_dict", "gather_full_parameters"])
def test_the_state_after_an_error_is_whole_and_float32(here, use):
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
    state = {name: torch.ones_like(value) for name, value in layers.state_dict().items()}
    if use != "load_state_dict":
        layers.load_state_dict(state)
    wrapped = FullyShardedDataParallel(layers.to(here.device), compute_dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="shapes"):
        wrapped(torch.ones(2, WIDTH + 1, device=here.device))
    if use == "load_state_dict":
        wrapped.load_state_dict(state)
    if use == "gather_full_parameters":
        whole = {name: value.cpu() for name, value in wrapped.gather_full_parameters().items()}
        torch.testing.assert_close(whole, dict(state), atol=0, rtol=0)
    torch.testing.assert_close(wrapped.module.state_dict(), state, atol=0, rtol=0)


@on_ranks(TWO, GPUS, repeats=1)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_around_wrappers(here, use_reentrant):
    """Backward runs layers again before it reaches an output of their wrapper."""
    gradients = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        layers = nn.LayerNorm(WIDTH), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        wrapped = nn.Sequential(
            *(FullyShardedDataParallel(layer.to(here.device), torch.bfloat16) for layer in layers)
        )
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(here.rank))
        x = x.to(here.device).requires_grad_()
        if checkpointed:
            output = checkpoint(wrapped, x, use_reentrant=use_reentrant)
        else:
            output = wrapped(x)
        output.float().sin().sum().backward()
        gradients.append([p.grad for p in wrapped.parameters()])
    torch.testing.assert_close(*gradients, atol=0, rtol=0)


@on_ranks(TWO, GPUS, repeats=1)
def test_one_rank_differentiates_its_output(here):
    """Other ranks need not run a backward that reaches no layer."""
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    wrapped = FullyShardedDataParallel(layers.to(here.device))
    output = wrapped(torch.ones(2, WIDTH, device=here.device))
    if here.rank == 0:
        torch.autograd.grad(output.sum(), output, retain_graph=True)
    output.sum().backward()
    assert_same_on_all_ranks([p.grad for p in layers[0].parameters() if p.dim() == 1])


@on_ranks(TWO, GPUS)
@pytest.mark.parametrize(
    ("policy", "dtype", "frozen", "recomputed"),
    [
        (None, None, False, []),
        (None, None, True, []),
        ("every_two", torch.bfloat16, False, [3, 4, 5, 6]),
        ("nested", None, False, [3, 4]),
    ],
    ids=["fp32", "frozen_blocks", "every_two_bf16", "nested"],
)
def test_weights_are_whole_only_around_their_layer(here, policy, dtype, frozen, recomputed):
    made = model(policy, frozen).to(here.device)
    matrices = {name: m for name, m in made.named_modules() if has_matrix(m)}
    wrapped = FullyShardedDataParallel(made, compute_dtype=dtype)
    x = torch.randn(BATCH, WIDTH, device=here.device)
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
        loss = loss_of_tokens(wrapped, x)
        phase = "recomputed"
        loss.backward()
        # The running layer and, once the order of layers is known, the next two.
        assert max(seen["forward"]) == (3 if step else 1)
        # The next two, and the running layer if its weight is frozen. Others were just freed.
        assert max(seen["backward"]) == (3 if frozen else 2)
        # The running layer, the next two, and those that backward is about to reach.
        assert sorted(set(seen["recomputed"])) == recomputed
        wrapped.finish_gradient_synchronization()
        assert not any(weight.gathered for weight in wrapped._weights)
    sizes = torch.tensor([module.weight.numel() for module in matrices.values()])
    sizes = sizes.to(here.device)
    torch.distributed.all_reduce(sizes)
    whole = wrapped.gather_full_parameters()
    assert sizes.tolist() == [whole[f"{name}.weight"].numel() for name in matrices]


@on_ranks(TWO, GPUS, repeats=1)
def test_evaluation_leaves_no_weight_whole(here):
    """Also not those of layers that it was expected to run."""
    wrapped = FullyShardedDataParallel(Branches().to(here.device))
    x = torch.ones(2, 3, device=here.device)
    wrapped(x, [0, 1, 2, 3]).sum().backward()
    with torch.no_grad():
        for used in ([0], [0, 1, 2, 3]):
            wrapped(x, used)
            assert not any(weight.gathered for weight in wrapped._weights)


@on_ranks(TWO, GPUS, repeats=1)
@pytest.mark.parametrize("peer_memory", [False, True])
def test_gradients_are_averaged_while_backward_runs(here, peer_memory):
    """Else the whole gradients of all layers would be in memory, and no transfer would overlap."""
    made = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(6))).to(here.device)
    wrapped = FullyShardedDataParallel(made, peer_memory=peer_memory)
    x = torch.randn(2, 4, device=here.device, requires_grad=True)
    averaged = []
    x.register_hook(lambda _: averaged.extend(p.grad is not None for p in wrapped.parameters()))
    wrapped(x).sum().backward()
    # The first layer has only now its gradient, and the averages of the next two may be in flight.
    assert averaged[3:] == [True] * 3


def _two_forwards(model: Any, x: Tensor, first: list[int], second: list[int]) -> Tensor:
    return model(x[:, :3], first).mean() + model(x[:, 3:], second).mean()


def odd_layers(run: Run, reentrant: bool | None) -> None:
    """Run a layer twice, and another one not in every forward. A weight has only one element."""
    run.make(partial(Branches, reentrant))
    some, more = [3], [0, 0, 1, 2, 3]
    for step, (first, second) in enumerate([(more, some), (some, more), (more, some)]):
        of = partial(_two_forwards, first=first, second=second)
        run.train(step, of)
        run.losses(step, of)  # forwards with a graph but without a backward
    run.train(3, of)  # the same layers again


@on_ranks(TWO, FOUR, GPUS, repeats=1)  # on four, weights have fewer rows than there are ranks
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_odd_layers(here, reentrant):
    compare(here, fsdp(), partial(odd_layers, reentrant=reentrant))


@on_ranks(TWO, GPUS, repeats=1)
@pytest.mark.parametrize("reentrant", [None, False])
def test_odd_layers_in_one_layer(here, reentrant):
    compare(here, fsdp(layers=(Branches,)), partial(odd_layers, reentrant=reentrant))


# ---- weights that are needed longer, or no more --------------------------------------------------


class Chained(nn.Linear):
    """The gradient of `scale` is complete before that of `x`, which needs the weight again."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(scale * super().forward(x))


class Prompted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Chained(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, self.scale)


def twice() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(layer, layer)


@on_ranks(TWO, GPUS, repeats=1)
@pytest.mark.parametrize("of_middle", [Prompted, twice])
def test_frozen_weights_are_there_for_backward(here, of_middle):
    def build() -> Net:
        middle = of_middle()
        for module in middle.children():
            module.requires_grad_(False)
        return Net(middle)

    compare(here, fsdp(), partial(plain, build=build))


class Cell(nn.Module):
    """One layer, with a frozen weight, whose output may be its next input."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.trained = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.trained(self.frozen(x)))


@on_ranks(TWO, GPUS, repeats=1)
def test_frozen_weights_are_there_for_the_forward_before(here):
    def of(cell: Any, x: Tensor) -> Tensor:
        return cell(cell(cell(x))).square().mean()

    compare(here, fsdp(layers=(Cell,)), partial(plain, build=Cell, of=of))


def part_after_a_step(run: Run) -> None:
    """After a forward without a backward, whose last layer stays whole, weights change."""
    run.make()
    run.train(0)
    run.losses(1)
    run.optimizer.step()
    run.results.append(run.made.last(torch.ones_like(run.shares(1)[0][:1])))


@on_ranks(TWO, GPUS, repeats=1)
def test_a_part_uses_the_present_weights(here):
    compare(here, fsdp(), part_after_a_step)


def after_a_failed_part(run: Run) -> None:
    run.make()
    run.train(0)
    with pytest.raises(RuntimeError):
        run.made.middle(run.shares(1)[0][:, 1:])
    run.train(1)


@on_ranks(TWO, GPUS, repeats=1)
def test_training_goes_on_after_a_part_has_failed(here):
    compare(here, fsdp(), after_a_failed_part)


class Parent(nn.Linear):
    """A layer with a child, whose output may be that of the child."""

    def __init__(self, last: Any) -> None:
        super().__init__(WIDTH, WIDTH)
        self.child, self.last = nn.Linear(WIDTH, WIDTH), last

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.child(super().forward(x)))


class Checkpointed(Parent):
    """One layer with its child, which checkpoints both."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(checkpoint(super().forward, x, use_reentrant=False))


class Loop(nn.Module):
    """Runs a layer at three depths, in checkpoints with a second output that nobody uses."""

    def __init__(self, parent: Parent) -> None:
        super().__init__()
        self.parent = parent
        self.unused, self.between = (nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x, _ = checkpoint(self._part, x, use_reentrant=False)
            x = torch.tanh(self.between(x))
        return x

    def _part(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.parent(x), torch.tanh(self.unused(x))


@on_ranks(TWO, GPUS, repeats=1)
@pytest.mark.parametrize("peer_memory", [False, True])
@pytest.mark.parametrize(
    "parent",
    [partial(Parent, torch.sin), partial(Parent, nn.Identity()), partial(Checkpointed, torch.tanh)],
    ids=["own_output", "output_of_the_child", "checkpointed"],
)
def test_recomputation_keeps_what_backward_has_reached(here, parent, peer_memory):
    wrapper = fsdp(peer_memory=peer_memory, layers=(Checkpointed,))
    compare(here, wrapper, partial(plain, build=lambda: Net(Loop(parent()))))


class Twins(nn.Module):
    """One layer, one output of which needs a weight again after the gradient of that is complete.

    Backward begins with the other output, which was computed last, and trains the weight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        frozen = checkpoint(self._encode, x, True, use_reentrant=False)
        return frozen, checkpoint(self._encode, 2 * x, False, use_reentrant=False)

    def _encode(self, x: Tensor, frozen: bool) -> Tensor:
        weight = self.encoder.weight.detach() if frozen else self.encoder.weight
        return torch.tanh(nn.functional.linear(torch.tanh(x), weight))


def before_twins() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Twins())


@on_ranks(TWO, GPUS, repeats=1)
@pytest.mark.parametrize("peer_memory", [False, True])
def test_every_output_of_a_layer_gathers_its_weights(here, peer_memory):
    def of(model: Any, x: Tensor) -> Tensor:
        frozen, trained = model(x)
        return (frozen + trained).square().mean()

    wrapper = fsdp(layers=(Twins,), peer_memory=peer_memory)
    compare(here, wrapper, partial(plain, build=before_twins, of=of))


class HalfHidden(nn.Linear):
    """A layer whose output has a tensor that FSDP sees, but not the one with a gradient."""

    def forward(self, x: Tensor) -> Any:
        return SimpleNamespace(value=super().forward(x)), torch.ones(1)


class Opens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = HalfHidden(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)[0].value


def train_beside_a_slow_rank(run: Run) -> None:
    """The other rank signals a channel of peer memory before this one has awaited the last time."""

    def slow_backward(_: nn.Module, args: Any, out: Tensor) -> None:
        out.register_hook(lambda _: sleep(0.02))

    with mock.patch.object(peer_memory, "MAX_CHANNELS", 16):  # 6 pairs for gathers
        run.make(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(10))))
    for layer in run.made if not run.alone and run.here.rank == 0 else ():
        layer.register_forward_hook(slow_backward)
    for step in range(2):
        run.train(step, lambda model, x: model(x).square().mean())


@on_ranks(TWO, repeats=1)
def test_more_gathers_than_channels(here):
    compare(here, fsdp(peer_memory=True), train_beside_a_slow_rank)


@on_ranks(TWO, GPUS, repeats=1)
@pytest.mark.parametrize("peer_memory", [False, True])
def test_backward_does_not_read_weights_that_are_freed(here, peer_memory):
    run = Run(here, fsdp(peer_memory=peer_memory))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        plain(run, lambda: Net(Opens()))


def clipped() -> Net:
    """Return a model with a hook that clips a weight, as of a WGAN's critic."""

    @torch.no_grad()
    def clip(layer: Any, _: Any) -> None:
        layer.weight.clamp_(-0.1, 0.1)

    net = Net()
    net.middle.register_forward_pre_hook(clip)
    return net


@on_ranks(TWO, GPUS, repeats=1)
def test_a_weight_that_forward_changes_is_refused(here):
    with pytest.raises(RuntimeError, match="forward of layer middle has changed its weight"):
        plain(Run(here, fsdp()), clipped)


def casting() -> Net:
    net = Net()
    net.middle.register_forward_pre_hook(lambda _, args: (args[0].float(),))
    return net


@on_ranks(TWO, GPUS, repeats=1)
def test_inputs_are_cast_after_the_hooks_of_the_user(here):
    run = Run(here, fsdp(compute_dtype=torch.bfloat16))
    plain(run, casting)
    seen = []
    run.made.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    assert run.model(run.shares(3)[0]).dtype == torch.bfloat16
    assert seen == [torch.bfloat16]  # those of the whole module are cast before


@on_ranks(TWO, GPUS, repeats=1)
def test_a_weight_of_another_shape_is_not_loaded(here):
    """Also not one with the shape of a shard."""
    wrapped = FullyShardedDataParallel(nn.Linear(WIDTH, WIDTH).to(here.device))
    state = wrapped.state_dict()
    for shape in [(2, 3), wrapped.module.weight.shape]:
        with pytest.raises(RuntimeError, match=rf"weight must have shape \({WIDTH}, {WIDTH}\)"):
            wrapped.load_state_dict({**state, "weight": torch.ones(shape)})
    with pytest.raises(RuntimeError, match="weight"):
        wrapped.load_state_dict({**state, "weight": 1})
    torch.testing.assert_close(wrapped.state_dict(), state, atol=0, rtol=0)
