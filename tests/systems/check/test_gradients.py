"""Tests of the gradient check: it accepts correct trainings and finds injected errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from systems.benchmark import WrongOutput
from systems.benchmarks.train_step import Params
from systems.check.gradients import TOLERANCE, check_training
from systems.kernels.flash_attention import naive
from systems.training.training import Training, make_training
from tests.systems.training.tiny_training import CPU, GPU, ON_CPU, params

pytestmark = pytest.mark.usefixtures("one_thread")

Sabotage = Callable[[Tensor], Tensor]
GRADIENTS: dict[str, Sabotage] = {
    "5 % too long": lambda g: g * 1.05,
    "5 % too short": lambda g: g * 0.95,
    "turned round": lambda g: -g,
    "zero": torch.zeros_like,
    "half of it zero": lambda g: torch.cat([g[: len(g) // 2], torch.zeros_like(g[len(g) // 2 :])]),
    "noise of its length": lambda g: torch.randn_like(g) * g.std(),
    "not a number": lambda g: g * math.nan,
}
# one parameter of each kind
PARAMETERS = [
    "token_embedding.weight",
    "blocks.1.attention_norm.weight",
    "blocks.1.attention.qkv.weight",
    "blocks.0.attention.out.weight",
    "blocks.2.feed_forward.gate_up.weight",
    "blocks.1.feed_forward.down.weight",
    "final_norm.weight",
    "output_head.weight",
]


def _trained(precision: str, steps: int = 0, **given: Any) -> Training:
    training = make_training(params(precision=precision), CPU, **given)
    for _ in range(steps):
        training.step()
    return training


@pytest.mark.parametrize("precision", ON_CPU)
def test_the_check_passes_what_is_right(precision):
    errors = check_training(_trained(precision, steps=2))
    # with a margin, because rounding differs between machines
    assert all(0 < errors[name] < 0.5 * limit for name, limit in TOLERANCE[precision].items())


@pytest.mark.parametrize(
    "sabotage",
    [x if x == "5 % too short" else pytest.param(x, marks=pytest.mark.slow) for x in GRADIENTS],
)
def test_the_check_finds_a_wrong_gradient_of_any_parameter(sabotage):
    for name, precision in zip(PARAMETERS, cycle(ON_CPU)):
        training = _trained(precision)
        weight = training.model.get_parameter(name)
        torch.manual_seed(0)
        weight.register_hook(GRADIENTS[sabotage])
        with pytest.raises(WrongOutput, match=rf"of {name}"):
            check_training(training)


def _with_gradient(x: Tensor, factor: float) -> Tensor:
    """Return a copy whose gradient is multiplied by a factor."""
    x = x.clone()
    x.register_hook(lambda grad: grad * factor)
    return x


def _attention(q: float = 1, k: float = 1, v: float = 1, **changed: Any) -> Callable[..., Tensor]:
    def attention(*qkv: Tensor, is_causal: bool) -> Tensor:
        scaled = [_with_gradient(x, f) for x, f in zip(qkv, (q, k, v), strict=True)]
        return naive(*scaled, **({"is_causal": is_causal} | changed))

    return attention


def _sees_one_ahead(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(2)
    return torch.softmax(scores.masked_fill(hidden, -math.inf), -1) @ v


ATTENTIONS: dict[str, Callable[..., Tensor]] = {
    "not causal": _attention(is_causal=False),
    "another scale": _attention(scale=0.3),
    "sees one ahead": _sees_one_ahead,
    "5 % more out": lambda q, k, v, is_causal: 1.05 * naive(q, k, v, is_causal),
    "no dq": _attention(q=0),
    "no dk": _attention(k=0),
    "no dv": _attention(v=0),
    "dq turned round": _attention(q=-1),
    "dk 5 % too long": _attention(k=1.05),
    "dv 5 % too short": _attention(v=0.95),
}


@pytest.mark.parametrize(
    ("precision", "wrong"),
    # bf16_pure has the largest tolerances.
    [
        *(("bf16_pure", wrong) for wrong in ATTENTIONS),
        *zip(cycle(["fp32", "bf16", "fp16", "bf16_master"]), ATTENTIONS),
    ],
)
def test_the_check_finds_a_wrong_attention(precision, wrong):
    with pytest.raises(
        WrongOutput, match=f"relative error of {precision} training against float64"
    ):
        check_training(_trained(precision, attention=ATTENTIONS[wrong]))


def test_the_right_attention_through_the_same_door_passes():
    check_training(_trained("fp32", attention=_attention()))


def test_the_check_finds_a_block_that_is_left_out():
    training = _trained("bf16")
    training.model.apply_blocks = lambda blocks, x: blocks[2](blocks[0](x))
    with pytest.raises(WrongOutput, match=r"no gradient for blocks\.1\.attention_norm"):
        check_training(training)


def test_the_check_finds_a_loss_that_is_off():
    training = _trained("bf16")
    right = training._loss_fn
    training._loss_fn = lambda tokens, targets: right(tokens, targets) * 1.02
    with pytest.raises(WrongOutput, match=r"loss (1\.9|2\.0)\d*e-02 \(at most 5e-03\)"):
        check_training(training)


def test_the_check_finds_a_training_that_blew_up():
    training = _trained("fp32")
    training.loss = torch.tensor(math.nan)
    with pytest.raises(WrongOutput, match="the loss of the last forward must be finite, got nan"):
        check_training(training)


@pytest.mark.gpu
@pytest.mark.parametrize("sabotage", GRADIENTS)
@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_the_check_finds_a_wrong_gradient_on_a_gpu(precision, sabotage):
    training = make_training(
        Params.model_validate(GPU | {"precision": precision}), torch.device("cuda")
    )
    training.model.blocks[1].attention.out.weight.register_hook(GRADIENTS[sabotage])
    with pytest.raises(WrongOutput, match=r"blocks\.1\.attention\.out\.weight"):
        check_training(training)
