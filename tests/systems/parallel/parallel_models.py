"""Models with unusual parameters, their batches, and comparisons with training in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from systems.model import TransformerLM, cross_entropy

BATCH = 12  # batch size of all ranks together, of which there are 2, 3 or 4
WIDTH = 6
VOCABULARY = 31


class Toy(nn.Module):
    """Model with odd shapes, biases, a norm, a buffer, a frozen layer and unused parameters."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 7)
        self.norm = nn.LayerNorm(7)
        self.frozen = nn.Linear(7, 7, bias=False).requires_grad_(False)
        self.never = nn.Linear(3, 3)
        self.last = nn.Linear(7, 1, bias=False)
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.gelu(self.first(x + self.shift)))
        return self.last(F.gelu(self.frozen(x)) + x)


class Tied(nn.Module):
    """Model whose embedding and output head share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.middle(self.embedding(tokens))))


class Mixed(nn.Module):
    """Model with layers of three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.in_bf16 = nn.Linear(WIDTH, 6, dtype=torch.bfloat16)
        self.in_fp32 = nn.Linear(6, 6)
        self.in_fp64 = nn.Linear(6, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.in_bf16(x.bfloat16()).float()
        return self.in_fp64(torch.tanh(self.in_fp32(x)).double()).float()


class Branches(nn.Module):
    """Model that runs only the layers that the caller selects, after one with a single weight."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.one = nn.Linear(1, 1)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.reentrant = reentrant  # None: without checkpoints

    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        x = x + self.one(x[:, :1])
        for i in used:
            if self.reentrant is None:
                x = self.layers[i](x)
            else:
                x = checkpoint(self.layers[i], x, use_reentrant=self.reentrant)
        return x


def transformer(**kwargs: Any) -> TransformerLM:
    return TransformerLM(VOCABULARY, 8, d_model=12, num_layers=2, num_heads=2, d_ff=20, **kwargs)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "toy": Toy,
    "tied": Tied,
    "transformer": transformer,
}


def build(name: str, seed: int, device: torch.device) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]().to(device)


def batch(name: str, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the input and target of a step for all ranks together."""
    generator = torch.Generator().manual_seed(1000 + step)
    if name == "toy":
        x = torch.randn(BATCH, WIDTH, generator=generator)
        return x.to(device), torch.randn(BATCH, 1, generator=generator).to(device)
    tokens = torch.randint(0, VOCABULARY, (BATCH, 9), generator=generator).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    return cross_entropy(out, y) if y.dtype == torch.int64 else F.mse_loss(out, y)


def share(tensors: tuple[Tensor, Tensor], rank: int, world_size: int) -> Iterator[Tensor]:
    """Return the part of a batch for one rank."""
    return (tensor.chunk(world_size)[rank] for tensor in tensors)


def train(
    here: Any, model: Any, optimizer: Any, name: str, steps: Iterable[int], scheduler: Any = None
) -> None:
    """Train on the batches of steps: a wrapper on the share of its rank, else on whole batches."""
    is_wrapper = hasattr(model, "finish_gradient_synchronization")
    for step in steps:
        optimizer.zero_grad()
        data = batch(name, step, here.device)
        if is_wrapper:
            loss_of(model, *share(data, here.rank, here.world_size)).backward()
            model.finish_gradient_synchronization()
        else:
            loss_of(model, *data).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()


def assert_same_on_all_ranks(tensors: Iterable[Tensor]) -> None:
    """Check that the tensors are bitwise equal on all ranks."""
    own = torch.cat([t.detach().contiguous().view(-1).view(torch.uint8) for t in tensors])
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    assert all(torch.equal(other, own) for other in everyone)


def share_of_tolerance(model: nn.Module, reference: nn.Module, tolerance: float) -> float:
    """Return the largest difference of the weights; `assert_close` allows a difference of 1."""
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(
        ((p - q).abs() / (tolerance + tolerance * q.abs())).max().item()
        for p, q in ((p.detach(), q.detach()) for p, q in pairs)
    )


def assert_close(model: nn.Module, reference: nn.Module, tolerance: float) -> None:
    ours, theirs = (dict(m.named_parameters()) for m in (model, reference))
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)
