"""Situations in which data parallel training goes wrong, and the wrappers that go through them.

A situation is a function that trains with a `Run`. It is called on every rank with a wrapper, and
once in one process, in float64, with the batches of all ranks. Afterwards, both must have the same
weights. A new situation is one function.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from systems.parallel import (
    BucketedDDP,
    FlatDDP,
    FullyShardedDataParallel,
    NaiveDDP,
    OverlappedDDP,
    PeerDDP,
    ShardedOptimizer,
)
from tests.systems.parallel.parallel_models import (
    BATCH,
    WIDTH,
    Toy,
    assert_same_on_all_ranks,
)
from tests.systems.parallel.ranks import RankContext

# lr / eps = 1, so an error of a gradient is not amplified in the update of its weight.
ADAM: dict[str, Any] = {"lr": 1e-2, "eps": 1e-2}


@dataclass(frozen=True)
class Wrapper:
    """A way to train on several ranks."""

    wrap: Callable[[nn.Module], nn.Module]
    optimizer: Callable[..., Any] = torch.optim.Adam
    shards_gradients: bool = False

    def make_optimizer(self, model: Any, parameters: Any, **options: Any) -> Any:
        more = {"shard_gradients": model} if self.shards_gradients else {}
        return self.optimizer(parameters, **more, **options)


def _zero(parameters: Any, **options: Any) -> Any:
    return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, **options)


def _sharded(parameters: Any, **options: Any) -> Any:
    return ShardedOptimizer(parameters, torch.optim.Adam, **options)


def _bucketed(module: nn.Module) -> nn.Module:
    return BucketedDDP(module, 0.0002)  # two or three weights in a bucket


_peer = partial(PeerDDP, bucket_size_mb=0.0002)
_torch_ddp = partial(DistributedDataParallel, find_unused_parameters=True)

OURS = {
    "naive": Wrapper(NaiveDDP),
    "flat": Wrapper(FlatDDP),
    "overlapped": Wrapper(OverlappedDDP),
    "bucketed": Wrapper(_bucketed),
    "peer": Wrapper(_peer),
    "sharded_optimizer": Wrapper(_bucketed, _sharded),
    "peer_optimizer": Wrapper(_bucketed, partial(_sharded, peer_memory=True)),
    "sharded_gradients": Wrapper(_peer, partial(_sharded, peer_memory=True), shards_gradients=True),
    "fsdp": Wrapper(FullyShardedDataParallel),
    "peer_fsdp": Wrapper(partial(FullyShardedDataParallel, peer_memory=True)),
}
WRAPPERS = OURS | {"torch_ddp": Wrapper(_torch_ddp), "torch_zero": Wrapper(_torch_ddp, _zero)}


class Failed(Exception):
    """Raised in the middle of forward or backward."""


def collectives() -> int:
    """Return the number of collectives started so far."""
    group: Any = dist.group.WORLD
    return group._get_sequence_number_for_group()


def _nothing(output: Tensor) -> None:
    pass


class Net(nn.Module):
    """Three layers, the second of which may be replaced. `at_middle` sees its output."""

    def __init__(self, middle: nn.Module | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.middle = middle or nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 1)
        self.at_middle: Callable[[Tensor], Any] = _nothing

    def forward(self, x: Tensor) -> Any:
        x = self.middle(torch.tanh(self.first(x)))
        self.at_middle(x)
        return self.last(torch.tanh(x))


class Run:
    """Training on this rank, or in one process with the batches of all ranks if `wrapper` is None.

    `made` is the unwrapped module as it was made; `model` is what runs.
    """

    def __init__(self, here: RankContext, wrapper: Wrapper | None):
        self.here, self.wrapper = here, wrapper
        self.alone = wrapper is None
        self.results: list[Tensor] = []  # other values that must be the same

    def new(self, build: Callable[[], nn.Module] = Net, seed: int | None = None) -> Any:
        """Return a model. Without a seed, other ranks than the first have other weights."""
        if seed is None:
            seed = 0 if self.alone else self.here.rank
        torch.manual_seed(seed)
        model = build().to(self.here.device)
        return model.double() if self.alone else model

    def make(self, build: Callable[[], nn.Module] = Net) -> None:
        """Make the model."""
        self.use(self.new(build))

    def use(self, made: nn.Module) -> None:
        """Wrap this module, and train it from now on."""
        self.made: Any = made
        self.model: Any = self.wrapped(made)
        self.optimizer = self.make_optimizer(self.model.parameters())

    def wrapped(self, module: nn.Module) -> nn.Module:
        return module if self.wrapper is None else self.wrapper.wrap(module)

    def make_optimizer(self, parameters: Any) -> Any:
        if self.wrapper is None:
            return torch.optim.Adam(parameters, **ADAM)
        return self.wrapper.make_optimizer(self.model, parameters, **ADAM)

    def shares(self, step: int) -> list[Tensor]:
        """Return the inputs of this rank, or those of all ranks if there is one process."""
        size = self.here.world_size
        x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        shares = x.to(self.here.device).chunk(size)
        return [s.double() for s in shares] if self.alone else [shares[self.here.rank]]

    def losses(self, step: int, of: Callable[[Any, Tensor], Tensor] | None = None) -> list[Tensor]:
        """Run forward: one loss, or one of each rank if there is one process.

        In one process, buffers keep the values after the first rank's part.
        """
        of = of or (lambda model, x: F.mse_loss(model(x).to(x.dtype), x[:, :1]))
        losses = []
        for x in self.shares(step):
            losses.append(of(self.model, x))
            if len(losses) == 1:
                kept = [(buffer, buffer.clone()) for buffer in self.made.buffers()]
        for buffer, value in kept:
            buffer.data.copy_(value)  # autograd may have saved the buffer
        return losses

    def backward(self, step: int, of: Any = None, scale: float = 1.0) -> None:
        self.differentiate(self.losses(step, of), scale)

    def differentiate(self, losses: list[Tensor], scale: float = 1.0, **options: Any) -> None:
        """Run backward for a result of `losses`."""
        for loss in losses:
            (loss * scale / len(losses)).backward(**options)

    def finish(self) -> None:
        if hasattr(self.model, "finish_gradient_synchronization"):
            self.model.finish_gradient_synchronization()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def update(self) -> None:
        """Finish the gradients, and step the optimizer."""
        self.finish()
        self.optimizer.step()

    def train(self, step: int, of: Any = None) -> None:
        self.zero_grad()
        self.backward(step, of)
        self.update()

    def no_sync(self, quiet: bool = True) -> contextlib.AbstractContextManager[Any]:
        nothing = contextlib.nullcontext
        return getattr(self.model, "no_sync", nothing)() if quiet else nothing()

    def with_gradients(self) -> list[Any]:
        return [parameter for parameter in self.model.parameters() if parameter.grad is not None]

    def values(self) -> dict[str, Tensor]:
        """Return copies of the weights, unsharded, the buffers and the results, by name."""
        state = self.model.state_dict().items()
        named = {name.removeprefix("module."): value for name, value in state}
        named |= {f"result {i}": result for i, result in enumerate(self.results)}
        return {name: value.to("cpu", torch.float64, copy=True) for name, value in named.items()}


def compare(here: RankContext, wrapper: Wrapper, situation: Callable[[Run], None]) -> None:
    """Run the situation with a wrapper and in one process, and compare the weights.

    On all ranks, they are equal to the last bit.
    """
    ours, alone = Run(here, wrapper), Run(here, None)
    situation(ours)
    situation(alone)
    actual = ours.values()
    tolerance = here.tolerance
    torch.testing.assert_close(actual, alone.values(), atol=tolerance, rtol=tolerance)
    assert_same_on_all_ranks(value.to(here.device) for value in actual.values())


# ---- a step that was not finished ----------------------------------------------------------------


def plain(run: Run, build: Callable[[], nn.Module] = Net, of: Any = None) -> None:
    run.make(build)
    for step in range(3):
        run.train(step, of)


def before_the_step(run: Run, act: Callable[[Run], object]) -> None:
    """Do something between backward and the step of the optimizer."""
    run.make()
    for step in range(3):
        run.zero_grad()
        run.backward(step)
        act(run)
        run.optimizer.step()


def _finish_twice(run: Run) -> None:
    run.finish()
    run.finish()


def _differentiate_inputs(run: Run) -> None:
    """Run a forward, and compute gradients of inputs."""
    for x in run.shares(7):
        torch.autograd.grad(run.model(x.requires_grad_()).sum(), x)
    run.losses(9)
    run.finish()


def _replace_data_of_gradients(run: Run) -> None:
    run.finish()
    for parameter in run.with_gradients():
        parameter.grad.data = parameter.grad.data * 0.5


def _replace_gradients(run: Run) -> None:
    for parameter in run.with_gradients():
        parameter.grad = parameter.grad * 0.5
    run.finish()


def _clip(run: Run) -> None:
    run.finish()
    if run.alone:
        norm = nn.utils.clip_grad_norm_(run.model.parameters(), 0.05)
    else:
        norm = run.model.clip_grad_norm_(0.05)
    run.results.append(norm)


def skipped_batch(
    run: Run, set_to_none: bool = True, finish: bool = False, quiet: bool = False
) -> None:
    run.make()
    run.train(0)
    run.zero_grad(set_to_none)
    with run.no_sync(quiet):
        run.backward(1)
    run.zero_grad(set_to_none)
    if finish:
        run.finish()
    run.backward(2)
    run.update()
    run.train(3)


def zeroed_between_forward_and_backward(run: Run, accumulates: bool = False) -> None:
    run.make()
    for step in range(3):
        if accumulates:
            with run.no_sync():
                run.backward(step + 7)
        losses = run.losses(step)
        run.zero_grad()
        run.differentiate(losses)
        run.update()


def scaled_between_backwards(run: Run) -> None:
    """Gradients are replaced between two backward passes that accumulate."""
    run.make()
    for step in range(3):
        run.backward(step)
        run.finish()
        for parameter in run.with_gradients():
            parameter.grad = parameter.grad * 0.5
    run.optimizer.step()


def accumulated(run: Run, quiet: int) -> None:
    """Accumulate three backward passes, the first `quiet` of them under no_sync."""
    run.make()
    for step in range(2):
        run.zero_grad()
        for part in range(3):
            with run.no_sync(part < quiet):
                run.backward(3 * step + part)
        run.update()


def inputs_differentiated_while_accumulating(run: Run) -> None:
    """The gradients of inputs come after averaged backwards, and after one under no_sync."""
    run.make()
    for step in range(2):
        run.zero_grad()
        for part in range(3):
            with run.no_sync(part == 1):
                run.backward(3 * step + part)
            for x in run.shares(7):
                torch.autograd.grad(run.model(x.requires_grad_()).sum(), x)
        run.update()


def two_backwards_of_one_forward(run: Run) -> None:
    run.make()
    run.zero_grad()
    losses = run.losses(0)
    for _ in range(2):
        run.differentiate(losses, retain_graph=True)
    run.update()


def evaluated_between_steps(run: Run, middle: Callable[[], nn.Module]) -> None:
    run.make(lambda: Net(middle()))
    for step in range(3):
        run.train(step)
        run.model.eval()
        with torch.no_grad():
            run.losses(100 + step)
        run.model.train()


def _after_gradient_of_the_input(model: Any, x: Tensor) -> Tensor:
    """`torch.autograd.grad` runs a backward that leaves no gradient in a parameter."""
    x = x.clone().requires_grad_()
    torch.autograd.grad(model(x).sum(), x)
    return F.mse_loss(model(x), x[:, :1].detach())


# ---- wrapping, parameters and gradients ----------------------------------------------------------


def frozen_and_unused(run: Run) -> None:
    """A parameter without a gradient keeps none: with zeros, weight decay would change it.

    Gradients are removed and set to zero in turn, because hooks then behave differently.
    """
    run.make(Toy)
    group = {"params": list(run.model.parameters()), "weight_decay": 0.5}
    run.optimizer = run.make_optimizer([group])
    for step in range(3):
        run.zero_grad(set_to_none=step % 2 == 0)
        run.backward(step)
        run.update()


def optimizer_before_wrapping(run: Run) -> None:
    run.made = run.new()
    run.optimizer = torch.optim.Adam(run.made.parameters(), **ADAM)
    run.model = run.wrapped(run.made)
    for step in range(2):
        run.train(step)


def options_by_dimensions(run: Run) -> None:
    """Weight decay for matrices only, which are recognized by their number of dimensions."""
    run.make()
    groups: list[dict[str, Any]] = [
        {"params": [p for p in run.model.parameters() if p.ndim >= 2], "weight_decay": 0.5},
        {"params": [p for p in run.model.parameters() if p.ndim < 2]},
    ]
    run.optimizer = run.make_optimizer(groups)
    for step in range(2):
        run.train(step)


def gradients_edited_by_a_hook(run: Run, first: bool) -> None:
    """A hook after the accumulation of a gradient runs before the gradient is sent.

    It is registered before wrapping, or after it.
    """

    def halve(parameter: Any) -> None:
        parameter.grad.mul_(0.5)

    made = run.new()
    if not first:
        run.use(made)
    for parameter in () if run.alone else made.parameters():
        parameter.register_post_accumulate_grad_hook(halve)
    if first:
        run.use(made)
    for step in range(2):
        run.zero_grad()
        run.backward(step, scale=0.5 if run.alone else 1.0)
        run.update()


def gradients_set_by_hand(run: Run) -> None:
    """Gradients come from `torch.autograd.grad`; `finish` averages them.

    The last ones replace those of the step before, which are not set to None.
    """
    run.make()
    run.train(0)
    for step in range(1, 3):
        if step == 1:
            run.zero_grad()
        losses = run.losses(step)
        total = torch.stack(losses).mean()
        parameters = list(run.made.parameters())
        for p, grad in zip(parameters, torch.autograd.grad(total, parameters), strict=True):
            p.grad = grad
        run.update()


class Body(Net):
    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.middle(torch.tanh(self.first(x))))


def head_outside_forward(run: Run) -> None:
    """A loss in chunks calls the last layer itself."""
    run.make(Body)

    def of(model: Any, x: Tensor) -> Tensor:
        outs = [run.made.last(chunk) for chunk in model(x).chunk(2)]
        return F.mse_loss(torch.cat(outs), x[:, :1])

    for step in range(2):
        run.train(step, of)


# ---- modules as people have them -----------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x[None]
        return self.attention(x, x, x)[0][0]


class Encoder(nn.TransformerEncoderLayer):
    """Layer of torch that, in evaluation, has a fast path that reads the weights of submodules."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 2, 8, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x[None])[0]


class Shared(nn.Module):
    """A layer that runs twice and whose weight is tied to that of another one."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.second, self.first):
            if self.reentrant is None:
                x = torch.tanh(layer(x))
            else:
                x = torch.tanh(checkpoint(layer, x, use_reentrant=self.reentrant))
        return x


def changed_in_place() -> nn.Module:
    """Return a model that changes the output of a layer, which is a view."""
    net = Net(Attention())
    net.at_middle = lambda x: x.mul_(2)
    return net


def hook_before() -> nn.Module:
    """Return a model with a hook of the user that computes with the weight of its layer."""

    def scale(layer: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (args[0] * layer.weight.mean(),)

    net = Net()
    net.middle.register_forward_pre_hook(scale)
    return net


class Constant(torch.autograd.Function):
    """Function that gives its second input no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return grad * 2, None


class WithoutGradient(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return Constant.apply(x, self.weight) + self.bias


class Strided(nn.Module):
    """A convolution whose weight and gradient are channels_last.

    With two channels, they are not contiguous. With one, they are, although they have the stride 1
    in three dimensions.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.shape = (channels, WIDTH // channels, 1)
        convolution = nn.Conv2d(channels, WIDTH, self.shape[1:])
        self.convolution = convolution.to(memory_format=torch.channels_last)
        assert self.convolution.weight.is_contiguous() == (channels == 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x.view(-1, *self.shape)).flatten(1)


@dataclass
class Out:
    value: Tensor
    name: str = "out"


class Holds(nn.Module):
    """A layer whose output is an object with a tensor."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.inside = Boxed(kind)

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x).value


class Boxed(nn.Linear):
    def __init__(self, kind: type) -> None:
        super().__init__(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return self.kind(value=super().forward(x))


class NetOut(Net):
    def forward(self, x: Tensor) -> Any:
        return Out(super().forward(x))


def output_is_a_dataclass(run: Run) -> None:
    run.make(NetOut)
    for step in range(2):
        run.zero_grad()
        losses = run.losses(step, lambda model, x: F.mse_loss(model(x).value, x[:, :1]))
        with torch.no_grad():  # frees weights that FSDP has gathered
            run.losses(step, lambda model, x: model(x).value)
        run.differentiate(losses)
        run.update()


def overflow_in_one_shard(run: Run) -> None:
    """All ranks skip the step if one rank finds an infinity. In one process, it is just skipped."""
    run.make()
    scaler = ShardedGradScaler(device=run.here.device.type, init_scale=4.0)
    for step in range(3):
        run.zero_grad()
        if run.alone and step == 1:
            continue
        run.backward(step, scale=1.0 if run.alone else float(scaler.scale(torch.ones(()))))
        run.finish()
        if run.alone:
            run.optimizer.step()
            continue
        if step == 1 and run.here.rank == 0:
            run.optimizer.param_groups[0]["params"][0].grad.view(-1)[:1] = torch.inf
        scaler.step(run.optimizer)
        scaler.update()


# ---- state ---------------------------------------------------------------------------------------


def nested_state(run: Run) -> None:
    """A module that contains a wrapper loads its own state."""
    run.make()
    run.train(0)
    parent = nn.ModuleDict({"part": nn.ModuleDict({"net": run.model})})
    state = {name: value.clone() for name, value in parent.state_dict().items()}
    assert all(name.startswith("part.net.") for name in state)
    run.train(1)
    parent.load_state_dict(state)
    run.train(2)


def state_of_one_process(run: Run) -> None:
    """The state of one process is loaded, and a plain module loads the state of the wrapper."""
    run.make()
    run.train(0)
    other = run.new(seed=7)
    run.model.load_state_dict(other.state_dict())
    run.train(1)
    other.load_state_dict(run.model.state_dict())


def copied(run: Run, through: Callable[[Any], Any]) -> None:
    """A copy of the module (EMA) computes the same, and can be wrapped and trained."""
    run.make()
    run.train(0)
    run.use(through(run.made))
    run.train(1)
    run.train(2)


def is_freed(run: Run) -> None:
    """Nothing keeps a model alive whose wrapper, optimizer and outputs were dropped."""
    references = []
    for step in range(4):
        run.make()
        run.train(step)
        references.append(weakref.ref(run.made))
        del run.made, run.model, run.optimizer
    gc.collect()
    assert [reference() for reference in references] == [None] * 4
    run.make()


_NAMED: tuple[Callable[[Run], None], ...] = (
    plain, skipped_batch, scaled_between_backwards, zeroed_between_forward_and_backward,
    two_backwards_of_one_forward, frozen_and_unused, optimizer_before_wrapping,
    options_by_dimensions, gradients_set_by_hand, head_outside_forward, output_is_a_dataclass,
    overflow_in_one_shard, nested_state, state_of_one_process, is_freed,
    inputs_differentiated_while_accumulating,
)  # fmt: skip
SITUATIONS: dict[str, Callable[[Run], None]] = {
    **{situation.__name__: situation for situation in _NAMED},
    "finish_is_forgotten": partial(before_the_step, act=lambda run: None),
    "finished_twice": partial(before_the_step, act=_finish_twice),
    "inputs_differentiated": partial(before_the_step, act=_differentiate_inputs),
    "data_of_gradients_replaced": partial(before_the_step, act=_replace_data_of_gradients),
    "gradients_replaced": partial(before_the_step, act=_replace_gradients),
    "clipped": partial(before_the_step, act=_clip),
    "skipped_batch_zeros": partial(skipped_batch, set_to_none=False),
    "skipped_batch_finished": partial(skipped_batch, finish=True),
    "no_sync_skipped": partial(skipped_batch, quiet=True),
    "no_sync_skipped_zeros": partial(skipped_batch, quiet=True, set_to_none=False),
    "no_sync_zeroed": partial(zeroed_between_forward_and_backward, accumulates=True),
    "accumulated": partial(accumulated, quiet=0),
    "accumulated_no_sync": partial(accumulated, quiet=2),
    "finished_after_no_sync": partial(accumulated, quiet=3),
    "two_forwards_one_backward": partial(
        plain, of=lambda model, x: F.mse_loss(model(x), model(2 * x))
    ),
    "batch_norm": partial(evaluated_between_steps, middle=lambda: nn.BatchNorm1d(WIDTH)),
    "transformer_encoder_layer": partial(evaluated_between_steps, middle=Encoder),
    "gradient_of_the_input": partial(plain, of=_after_gradient_of_the_input),
    "gradients_edited_by_a_hook": partial(gradients_edited_by_a_hook, first=True),
    "gradients_edited_by_a_later_hook": partial(gradients_edited_by_a_hook, first=False),
    "multihead_attention": partial(plain, build=lambda: Net(Attention())),
    "tied": partial(plain, build=lambda: Net(Shared())),
    "tied_checkpointed": partial(plain, build=lambda: Net(Shared(reentrant=False))),
    "tied_checkpointed_reentrant": partial(plain, build=lambda: Net(Shared(reentrant=True))),
    "output_changed_in_place": partial(plain, build=changed_in_place),
    "hook_before_forward": partial(plain, build=hook_before),
    "weight_without_gradient": partial(plain, build=lambda: Net(WithoutGradient(WIDTH, WIDTH))),
    "channels_last": partial(plain, build=lambda: Net(Strided(2))),
    "channels_last_contiguous": partial(plain, build=lambda: Net(Strided(1))),
    "layer_returns_a_dataclass": partial(plain, build=lambda: Net(Holds(Out))),
    "layer_hides_its_output": partial(plain, build=lambda: Net(Holds(SimpleNamespace))),
    "deepcopied": partial(copied, through=copy.deepcopy),
    "pickled": partial(copied, through=lambda made: pickle.loads(pickle.dumps(made))),
}
