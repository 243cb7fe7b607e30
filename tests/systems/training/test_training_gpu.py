"""Tests of Training on a GPU: graphs, compilation and precisions have the losses of eager training,
and peak memory is as predicted."""

from __future__ import annotations

import gc
from itertools import product
from typing import Any

import pytest
import torch

from systems import accounting
from systems.benchmarks.train_step import Params, predict, run
from systems.check.gradients import TOLERANCE
from systems.kernels.flash_attention import naive
from systems.training.training import make_training, new_model
from tests.systems.training.tiny_training import GPU

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_thread")]

# Tolerances of losses, relative: of the first step, with equal weights, and of the next four, in
# which atomic additions and different kernels may round differently.
FIRST_LOSS = {"fp32": 1e-6, "tf32": 1e-3, "bf16": 1e-3, "fp16": 1e-4, "bf16_pure": 1e-3}
LATER_LOSS = {"fp32": 1e-4, "tf32": 5e-3, "bf16": 1e-2, "fp16": 5e-3, "bf16_pure": 2e-2}


def _losses(**given: Any) -> list[float]:
    training = make_training(Params.model_validate(GPU | given), torch.device("cuda"))
    losses = []
    for _ in range(5):
        training.step()
        losses.append(training.loss.item())
    return losses


def _assert_trains_alike(losses: list[float], plain: list[float], precision: str) -> None:
    assert losses[0] == pytest.approx(plain[0], rel=FIRST_LOSS[precision])
    assert losses == pytest.approx(plain, rel=LATER_LOSS[precision])
    assert plain[-1] < 0.9 * plain[0]  # the loss decreases far more than the tolerance


@pytest.mark.parametrize(
    ("precision", "given", "faster"),
    [
        *product(
            ["fp32", "bf16", "fp16", "bf16_pure"],
            [{}, {"mode": "compiled_blocks"}],
            [{"cuda_graph": True}],
        ),
        *product(["fp32", "bf16", "bf16_pure"], [{"optimizer": "fused"}], [{"cuda_graph": True}]),
        *product(["fp32", "bf16"], [{}], [{"mode": "compiled"}, {"mode": "compiled_blocks"}]),
    ],
)
def test_graphs_and_compiled_code_train_as_launches_do(precision, given, faster):
    losses = _losses(precision=precision, **given, **faster)
    _assert_trains_alike(losses, _losses(precision=precision, **given), precision)


@pytest.mark.parametrize(
    "given", [{"mode": "compiled"}, {"mode": "compiled_blocks"}, {"cuda_graph": True}]
)
def test_tf32_is_what_is_compiled_and_captured(given):
    """TF32 is allowed during compilation and capture, although it is forbidden outside of phases.

    Otherwise the first loss would be bitwise equal to that of float32.
    """
    assert not torch.backends.cuda.matmul.allow_tf32
    losses = _losses(precision="tf32", **given)
    _assert_trains_alike(losses, _losses(precision="tf32"), "tf32")
    assert losses[0] != _losses(precision="fp32", **given)[0]
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16_pure"])
def test_a_graph_leaves_first_weights_and_optimizer_as_they_were(precision):
    point = Params.model_validate(GPU | {"precision": precision, "cuda_graph": True})
    training = make_training(point, torch.device("cuda"))
    first = new_model(point, torch.device("cuda"), naive)
    for (name, weight), begin in zip(
        training.model.named_parameters(), first.parameters(), strict=True
    ):
        assert torch.equal(weight, begin.to(weight.dtype)), name
    for state in training.optimizer.state.values():
        assert not any(tensor.any() for tensor in state.values())
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    assert training.scaler.state_dict() == scaler.state_dict()


@pytest.mark.parametrize(
    "given",
    [
        {"precision": "fp32"},
        {"precision": "tf32"},
        {"precision": "fp16", "cuda_graph": True},
        {"precision": "bf16", "mode": "compiled", "attention": "sdpa_cudnn"},
        {"precision": "bf16", "mode": "compiled_blocks", "cuda_graph": True},
        {"precision": "bf16_pure", "attention": "sdpa_flash", "cuda_graph": True},
        {"precision": "bf16_master", "optimizer": "fused", "attention": "sdpa_flash"},
        {"precision": "bf16", "checkpointing": "selective", "attention": "sdpa_flash"},
        {"precision": "fp32", "checkpointing": "nested", "mode": "compiled_blocks"},
    ],
)
def test_facts_on_a_gpu(given):
    point = Params.model_validate(GPU | {"warmup_steps": 2} | given)
    result = run(point)
    peaks = result["peak_memory_bytes"]
    if point.cuda_graph:
        assert peaks == {}  # a replay allocates nothing
    else:
        assert set(peaks) == {"forward", "backward", "optimizer", "train_step"}
        assert peaks["train_step"] == max(peaks.values())
        state = accounting.model_state_bytes(point.model_size, point.precision)
        assert min(peaks.values()) >= state["weights"] + state["optimizer_state"]
    limits = TOLERANCE[point.precision]
    errors = result["facts"]["relative_error"]
    assert all(errors[name] <= limit for name, limit in limits.items())
    made_once = point.mode != "eager" or point.cuda_graph
    assert (result["compiling_seconds"] is not None) == made_once
    assert len(result["samples_ms"]["train_step"]) >= 5


def test_the_peak_of_a_forward_holds_one_graph():
    given = {"size": "small", "context_length": 512, "passes": "forward", "measure_steps": 2}
    point = Params.model_validate(given)
    gc.collect()
    left_by_others = torch.cuda.memory_allocated()
    peak = run(point)["peak_memory_bytes"]["forward"] - left_by_others
    assert peak == pytest.approx(predict(point)["peak_memory_bytes"], rel=0.1)


def test_the_series_of_steps_lasts_long_enough_to_measure_its_energy():
    measured = run(Params.model_validate(GPU | {"measure_steps": 2}))
    samples = measured["samples_ms"]["train_step"]
    assert sum(samples) > 1000 and len(samples) > 2
    assert measured["facts"]["sustained_calls"] == {"train_step": len(samples) + 1}
