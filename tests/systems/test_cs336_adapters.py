"""The hooks of examples/cs336/adapters.py do what the tests of CS336, assignment 2, ask of them.

Distributed hooks run on two Gloo ranks, as in the assignment, and are compared with training in one
process. The Triton hook is tested in tests/interpreted and, on a GPU, here. A function whose first
argument is a `RankContext` is a case: every rank runs it.
"""

from __future__ import annotations

import inspect
import runpy
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from examples.cs336 import adapters
from systems.model import Embedding, Linear, RMSNorm
from tests.systems.kernels.attention_error import NAMES, assert_within_limits
from tests.systems.kernels.flash_cases import F32, inputs
from tests.systems.parallel.parallel_models import assert_close, assert_same_on_all_ranks
from tests.systems.parallel.ranks import RankContext

# Parameters of the hooks, by edition
BOTH = {
    "get_flashattention_autograd_function_pytorch": [],
    "get_flashattention_autograd_function_triton": [],
    "get_sharded_optimizer": ["params", "optimizer_cls", "kwargs"],
}
HOOKS = {
    2025: BOTH
    | {
        "get_ddp_individual_parameters": ["module"],
        "ddp_individual_parameters_on_after_backward": ["ddp_model", "optimizer"],
        "get_ddp_bucketed": ["module", "bucket_size_mb"],
        "ddp_bucketed_on_after_backward": ["ddp_model", "optimizer"],
        "ddp_bucketed_on_train_batch_start": ["ddp_model", "optimizer"],
    },
    2026: BOTH
    | {
        "get_ddp": ["module"],
        "ddp_on_after_backward": ["ddp_model", "optimizer"],
        "get_fsdp": ["module", "compute_dtype"],
        "fsdp_on_after_backward": ["fsdp_model", "optimizer"],
        "fsdp_gather_full_params": ["fsdp_model"],
    },
}


@pytest.mark.parametrize("edition", HOOKS)
def test_every_hook_of_the_edition_is_there(edition: int) -> None:
    for name, parameters in HOOKS[edition].items():
        hook = getattr(adapters, name)
        assert list(inspect.signature(hook).parameters) == parameters, name
        assert str(edition) in hook.__doc__, name
        assert name in adapters.__doc__, name


def test_there_is_no_other_hook() -> None:
    own = {
        name
        for name, value in inspect.getmembers(adapters, inspect.isfunction)
        if value.__module__ == adapters.__name__
    }
    assert own == {name for hooks in HOOKS.values() for name in hooks}


def test_a_copy_in_the_tests_of_the_assignment_is_importable(tmp_path: Path, monkeypatch) -> None:
    copy = tmp_path / "tests" / "adapters.py"
    copy.parent.mkdir()
    shutil.copy(adapters.__file__, copy)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tests", "examples")]:
        monkeypatch.setitem(sys.modules, name, None)  # not importable there
    copied = runpy.run_path(str(copy), run_name="tests.adapters")
    assert (
        copied["get_flashattention_autograd_function_triton"]().__name__ == "FlashAttentionTriton"
    )


# ---- attention -----------------------------------------------------------------------------------


def attention_results(hook: Callable[[], type], q: Tensor, k: Tensor, v: Tensor, dout: Tensor,
                      is_causal: bool) -> dict[str, Tensor]:  # fmt: skip
    """Return out, the saved log-sum-exp, dq, dk and dv of the class that a hook returns."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = hook().apply(*leaves, is_causal)
    (lse,) = [x for x in out.grad_fn.saved_tensors if x.shape == q.shape[:2]]
    out.backward(dout)
    results = (out.detach(), lse, *(leaf.grad for leaf in leaves))
    return dict(zip(NAMES, results, strict=True))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(128, 128), (33, 50)])
def test_attention_in_pytorch(lengths: tuple[int, int], is_causal: bool) -> None:
    tensors = inputs(lengths, 64, F32, leading=(4,))
    hook = adapters.get_flashattention_autograd_function_pytorch
    assert issubclass(hook(), torch.autograd.Function)
    assert_within_limits(attention_results(hook, *tensors, is_causal), *tensors, is_causal)


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("lengths", [(128, 128), (33, 50)])
def test_attention_in_triton(lengths: tuple[int, int], is_causal: bool) -> None:
    tensors = inputs(lengths, 64, F32, leading=(4,), device="cuda")
    hook = adapters.get_flashattention_autograd_function_triton
    found = attention_results(hook, *tensors, is_causal)
    assert_within_limits(found, *tensors, is_causal, split_float32=True)


# ---- models and batches --------------------------------------------------------------------------

BATCH = 12  # of all ranks together
FEATURES, CLASSES = 9, 5


class FrozenParts(nn.Module):
    """Model with a frozen bias in a trained layer, and a frozen parameter that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 14)
        self.first.bias.requires_grad_(False)
        self.constant = nn.Parameter(torch.tensor([3.0, 1.0]), requires_grad=False)
        self.last = nn.Linear(14, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)))


class TiedLayers(nn.Module):
    """Model in which two Linear layers with another between them share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 14, bias=False)
        self.between = nn.Linear(14, FEATURES, bias=False)
        self.again = nn.Linear(FEATURES, 14, bias=False)
        self.again.weight = self.first.weight
        self.last = nn.Linear(14, CLASSES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.between(torch.tanh(self.first(x))))
        return self.last(torch.tanh(self.again(x)))


class Tokens(nn.Module):
    """Model of token ids with sharded weights (Embedding, Linear) and replicated ones (RMSNorm)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding(21, 10)
        self.norm = RMSNorm(10)
        self.middle = Linear(10, 15)
        self.last_norm = RMSNorm(15)
        self.last = Linear(15, 21)

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.gelu(self.middle(self.norm(self.embedding(tokens))))
        return self.last(self.last_norm(x))


MODELS = {model.__name__: model for model in (FrozenParts, TiedLayers, Tokens)}


def batch(model: str, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of a step for all ranks together."""
    generator = torch.Generator().manual_seed(500 + step)
    if model == "Tokens":
        pair = torch.randint(0, 21, (2, BATCH, 6), generator=generator)
        return pair[0].to(device), pair[1].to(device)
    x = torch.randn(BATCH, FEATURES, generator=generator)
    return x.to(device), torch.randn(BATCH, CLASSES, generator=generator).to(device)


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    if target.dtype == torch.int64:
        return F.cross_entropy(out.float().flatten(0, 1), target.flatten())
    return F.mse_loss(out, target)


def share(tensors: tuple[Tensor, Tensor], here: RankContext) -> Iterator[Tensor]:
    """Return the part of a batch for one rank."""
    return (tensor.chunk(here.world_size)[here.rank] for tensor in tensors)


# The tests of the assignment use Gloo on GPUs, too, with one or several ranks per GPU.
two_gloo_ranks = pytest.mark.parametrize(
    ("ranks", "device_type"),
    [
        pytest.param(("gloo", 2), "cpu", id="cpu"),
        pytest.param(("gloo", 2), "cuda", id="cuda", marks=pytest.mark.gpu),
    ],
    indirect=["ranks"],
)


def moved(here: RankContext, device_type: str) -> RankContext:
    """Return the context with the device of this rank, which several ranks may share."""
    if device_type == "cpu":
        return here
    device = torch.device("cuda", here.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return here._replace(device=device)


# ---- DDP -----------------------------------------------------------------------------------------

# Hooks that return the module, that run after backward and, if there is one, before a step
DDP: dict[str, tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any] | None]] = {
    "individual": (
        adapters.get_ddp_individual_parameters,
        adapters.ddp_individual_parameters_on_after_backward,
        None,
    ),
    "2026": (adapters.get_ddp, adapters.ddp_on_after_backward, None),
}
DDP |= {
    f"buckets_of_{size}_MB": (
        partial(adapters.get_ddp_bucketed, bucket_size_mb=size),
        adapters.ddp_bucketed_on_after_backward,
        adapters.ddp_bucketed_on_train_batch_start,
    )
    for size in (0.0001, 0.0006, 0.01, None)
}


def ddp_trains_as_one_process(
    here: RankContext, device_type: str, name: str, model_name: str
) -> None:
    wrap, on_after_backward, on_train_batch_start = DDP[name]
    here = moved(here, device_type)
    torch.manual_seed(here.rank)  # ranks start with different values
    model = MODELS[model_name]().to(here.device)
    start = [p.detach().clone() for p in model.parameters()]
    wrapped = wrap(model)
    assert_same_on_all_ranks(wrapped.module.state_dict().values())
    if here.rank == 0:
        assert all(map(torch.equal, start, model.parameters()))
    reference = MODELS[model_name]().to(here.device)
    reference.load_state_dict(wrapped.module.state_dict())
    frozen = [p.detach().clone() for p in reference.parameters() if not p.requires_grad]

    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    alone = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(4):
        if on_train_batch_start is not None:
            on_train_batch_start(ddp_model=wrapped, optimizer=optimizer)
        optimizer.zero_grad()
        alone.zero_grad()
        data = batch(model_name, step, here.device)
        x, target = share(data, here)
        loss_of(wrapped(x), target).backward()
        on_after_backward(ddp_model=wrapped, optimizer=optimizer)
        optimizer.step()
        loss_of(reference(data[0]), data[1]).backward()
        alone.step()
        assert_close(wrapped.module, reference, here.tolerance)
    assert_same_on_all_ranks(wrapped.parameters())
    still = [p for p in wrapped.parameters() if not p.requires_grad]
    assert all(map(torch.equal, frozen, still)) and all(p.grad is None for p in still)


# The hooks are those of systems.parallel, which has tests of its own. Each meets one model here.
@pytest.mark.slow
@pytest.mark.parametrize(("name", "model_name"), list(zip(DDP, cycle(MODELS))))
@two_gloo_ranks
def test_ddp(ranks, device_type: str, name: str, model_name: str) -> None:
    ranks.assert_passes(ddp_trains_as_one_process, device_type, name, model_name, repeats=1)


# ---- FSDP ----------------------------------------------------------------------------------------


@contextmanager
def deterministic() -> Iterator[None]:
    """Allow only deterministic operations, as the tests of the assignment do for FSDP."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def cast_out(model: nn.Module, x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the output of a model whose Linear and Embedding weights are cast to `dtype`.

    Other parameters keep their dtype. The gradients of all parameters have the parameter's dtype.
    """
    if dtype is None:
        return model(x)
    cast = {
        f"{name}.weight": module.weight.to(dtype)
        for name, module in model.named_modules()
        if isinstance(module, (Linear, Embedding))
    }
    return functional_call(model, cast, x)


def fsdp_trains_as_one_process(
    here: RankContext, device_type: str, model_name: str, dtype: torch.dtype | None
) -> None:
    # In float16, a gradient has an error of a few unit roundoffs of 2^-11. Gradients are below 1
    # and the learning rate is 0.01, so one roundoff changes a weight by at most 5e-6 per step.
    here = moved(here, device_type)
    rate, tolerance = (0.1, here.tolerance) if dtype is None else (0.01, 1e-4)
    torch.manual_seed(7)
    model, reference = MODELS[model_name](), MODELS[model_name]()
    reference.load_state_dict(model.state_dict())
    model.to(here.device)
    reference.to(here.device)
    wrapped = adapters.get_fsdp(model, compute_dtype=dtype)
    names = [name for name, _ in reference.named_parameters(remove_duplicate=False)]

    optimizer = torch.optim.SGD(wrapped.parameters(), lr=rate)
    alone = torch.optim.SGD(reference.parameters(), lr=rate)
    for step in range(3):
        optimizer.zero_grad(set_to_none=True)
        alone.zero_grad(set_to_none=True)
        data = batch(model_name, step, here.device)
        x, target = share(data, here)
        loss_of(wrapped(x), target).backward()
        adapters.fsdp_on_after_backward(wrapped, optimizer)
        check_gradients(wrapped)
        optimizer.step()
        loss_of(cast_out(reference, data[0], dtype), data[1]).backward()
        alone.step()
        full = adapters.fsdp_gather_full_params(wrapped)
        assert list(full) == names
        for name, parameter in reference.named_parameters():
            difference = full[name] - parameter.detach()
            assert full[name].dtype == torch.float32, name
            assert (difference.abs() <= tolerance * (1 + parameter.detach().abs())).all(), name


def check_gradients(wrapped: nn.Module) -> None:
    """Check shapes, dtypes and, for parameters that are not sharded, equality on all ranks."""
    for parameter in wrapped.module.parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None
            continue
        assert parameter.grad is not None
        assert parameter.grad.shape == parameter.shape
        assert parameter.grad.dtype == parameter.dtype == torch.float32
    norms = [module for module in wrapped.modules() if isinstance(module, RMSNorm)]
    if norms:
        assert_same_on_all_ranks(norm.weight.grad for norm in norms)


def fsdp_on_deterministic_operations(here: RankContext, *arguments: object) -> None:
    with deterministic():
        fsdp_trains_as_one_process(here, *arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_name", "dtype"),
    [("Tokens", torch.float16), ("FrozenParts", None), ("TiedLayers", None)],
)
@two_gloo_ranks
def test_fsdp(ranks, device_type: str, model_name: str, dtype: torch.dtype | None) -> None:
    case = fsdp_on_deterministic_operations if device_type == "cpu" else fsdp_trains_as_one_process
    ranks.assert_passes(case, device_type, model_name, dtype, repeats=1)


def fsdp_shards(here: RankContext) -> None:
    wrapped = adapters.get_fsdp(Tokens())
    sizes = torch.tensor([p.numel() for p in wrapped.parameters()])
    whole = torch.tensor([p.numel() for p in Tokens().parameters()])
    dist.all_reduce(sizes)
    replicated = torch.tensor([p.dim() == 1 for p in Tokens().parameters()])
    assert torch.equal(sizes, torch.where(replicated, here.world_size * whole, whole))


@pytest.mark.parametrize("ranks", [("gloo", 2)], ids=["cpu"], indirect=True)
def test_fsdp_shards_weights(ranks) -> None:
    ranks.assert_passes(fsdp_shards, repeats=1)


# ---- sharded optimizer ---------------------------------------------------------------------------


def sharded_optimizer_steps_as_one_process(
    here: RankContext, device_type: str, model_name: str, grouped: bool
) -> None:
    here = moved(here, device_type)
    torch.manual_seed(42)
    model, reference = MODELS[model_name](), MODELS[model_name]()
    reference.load_state_dict(model.state_dict())
    model.to(here.device)
    reference.to(here.device)

    def parameters(module: nn.Module) -> object:
        every = list(module.parameters())
        return (
            [{"params": every[:1], "lr": 0.03}, {"params": every[1:]}] if grouped else iter(every)
        )

    options = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.999), "eps": 1e-8}
    sharded = adapters.get_sharded_optimizer(parameters(model), torch.optim.AdamW, **options)
    alone = torch.optim.AdamW(parameters(reference), **options)
    for step in range(10):
        x, target = batch(model_name, step, here.device)  # the same on all ranks
        for module, optimizer in ((model, sharded), (reference, alone)):
            optimizer.zero_grad()
            loss_of(module(x), target).backward()
            optimizer.step()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        # Both sides run the same operations, so the tolerance of the assignment holds.
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-7, atol=0)
    assert_same_on_all_ranks(model.parameters())
    states = torch.tensor(len(sharded.state))
    assert states < len(alone.state)
    dist.all_reduce(states)
    assert states == len(alone.state)


@pytest.mark.parametrize(
    ("model_name", "grouped"),
    [
        ("Tokens", True),
        pytest.param("FrozenParts", False, marks=pytest.mark.slow),
        pytest.param("TiedLayers", True, marks=pytest.mark.slow),
    ],
)
@two_gloo_ranks
def test_sharded_optimizer(ranks, device_type: str, model_name: str, grouped: bool) -> None:
    ranks.assert_passes(
        sharded_optimizer_steps_as_one_process, device_type, model_name, grouped, repeats=1
    )
