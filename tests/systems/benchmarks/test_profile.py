"""Tests of the profile benchmark with profiles of a small training, on a CPU and on a GPU."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
import torch

from systems.accounting import softmax_over_matmul_flops
from systems.benchmarks.profile import PROFILED_STEPS, Params, predict, run
from systems.measure import windows
from systems.measure.profiler.kernel_table import ATTENTION_RANGES, PHASES
from systems.training.profiling import has_attention_ranges
from tests.systems.training.tiny_training import TINY, no_gpu

pytestmark = pytest.mark.usefixtures("artifacts")


def params(**given: Any) -> Params:
    return Params.model_validate(TINY | given)


def test_operations_of_softmax_by_hand():
    # 5 operations per score and two matmuls of 2 * 64 operations per score in forward; 4 operations
    # and four matmuls in backward.
    assert softmax_over_matmul_flops("forward", 64) == 5 / 256
    assert softmax_over_matmul_flops("backward", 64) == 4 / 512
    assert predict(params())["softmax_over_matmul_flops"]["forward"] == 5 / 64  # head_dim 16


def check(measured: dict[str, Any]) -> None:
    """Check the properties that every profile has."""
    facts = measured["facts"]
    samples, steps = measured["samples_ms"], TINY["measure_steps"]
    assert set(samples) == {*PHASES, "forward_backward", "train_step"}
    assert len(samples["forward"]) == steps
    # A GPU runs more steps in a row, so that their energy can be measured.
    more = len(samples["train_step"]) - steps
    assert more >= 0 if torch.cuda.is_available() else more == 0
    assert facts["profiled_steps"] == PROFILED_STEPS
    for name, rows in facts["kernel_classes"].items():
        assert sum(row["time_share"] for row in rows) == pytest.approx(1, abs=1e-4)
        total = sum(row["time_ms"] for row in rows)
        assert total == pytest.approx(facts["kernel_ms"][name], rel=1e-3)
        # All steps are alike, so the number of calls per step is an integer.
        assert all(isinstance(row["calls"], int) for row in facts["kernels"][name])
    for phase in PHASES:
        assert facts["kernels"][phase] and 0 < facts["busy_share"][phase] <= 1
        assert facts["kernel_ms"][phase] <= 1.02 * facts["range_ms"][phase]
    assert facts["top_kernel"]["optimizer"] == facts["kernels"]["optimizer"][0]["kernel"]


@no_gpu
def test_ranges_of_a_training_on_a_processor(artifacts):
    windows.forget()
    measured = run(params(trace=True))
    check(measured)
    noted = windows.windows()
    assert {len(noted[phase]) for phase in PHASES} == {TINY["measure_steps"]}  # without warm-up
    calls = {
        name: {row["kernel"]: row["calls"] for row in rows}
        for name, rows in measured["facts"]["kernels"].items()
    }
    # Three blocks, each with one matmul for scores and one for the output; two each in backward.
    for part, products in (("attention_scores", 3), ("attention_output", 3)):
        assert calls[part]["aten::bmm"] == products
        assert calls[part + "_backward"]["aten::bmm"] == 2 * products
    assert calls["attention_softmax"]["aten::_softmax"] == 3
    assert calls["attention_softmax_backward"]["aten::_softmax_backward_data"] == 3
    # Four matmuls with weights per block, and the output head.
    assert calls["forward"]["aten::mm"] == 3 * 4 + 1
    assert calls["backward"]["aten::mm"] == 2 * (3 * 4 + 1)
    assert calls["optimizer"]["aten::_fused_adamw_"] == 1
    with gzip.open(artifacts / measured["facts"]["trace"], "rt") as file:
        names = {e["name"] for e in json.load(file)["traceEvents"]}
    assert names >= {*PHASES, *ATTENTION_RANGES}


@pytest.mark.parametrize(
    "given",
    [
        {"attention": "sdpa"},
        {"mode": "compiled_blocks"},
        {"cuda_graph": True},
        {"checkpointing": "every_k"},
    ],
)
def test_attention_that_has_no_parts_has_no_ranges(given):
    assert has_attention_ranges(params()) and not has_attention_ranges(params(**given))


@no_gpu
def test_without_ranges_in_attention_the_phases_are_profiled():
    measured = run(params(attention="sdpa"))
    check(measured)
    assert set(measured["facts"]["kernels"]) == {*PHASES, "train_step"}
    assert measured["facts"].keys().isdisjoint({"softmax_ms", "trace"})


# ---- on a GPU ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_gpu() -> dict[str, Any]:
    return run(params(size="small", context_length=512, batch_size=4, vocab_size=10_000))


@pytest.mark.gpu
def test_kernels_of_every_phase_are_found(on_gpu):
    check(on_gpu)
    facts = on_gpu["facts"]
    assert facts["counted"] == "GPU kernels"
    assert facts["kernels"]["optimizer"][0]["class"] == "optimizer"
    assert facts["matmul_share"]["optimizer"] < 0.01
    assert facts["matmul_share"]["forward"] > 0.3
    assert facts["matmul_share"]["train_step"] > 0.3
    classes = {row["class"]: row["time_share"] for row in facts["kernel_classes"]["train_step"]}
    assert classes.get("other", 0) < 0.1


def _calls(facts: dict[str, Any], name: str, kind: str) -> float:
    rows = facts["kernel_classes"][name]
    return next((row["calls"] for row in rows if row["class"] == kind), 0)


@pytest.mark.gpu
def test_kernels_inside_attention_are_found_forward_and_backward(on_gpu):
    facts = on_gpu["facts"]
    for part in ("attention_scores", "attention_output"):
        # One matmul per block, two in backward; cuBLAS may split one into several kernels.
        assert _calls(facts, part, "matmul") >= 12
        assert _calls(facts, part + "_backward", "matmul") >= 24
        assert facts["kernel_ms"][part] < facts["kernel_ms"]["forward"]
    # Backward first multiplies P and dP in a separate kernel.
    for part, classes in (("", {"softmax"}), ("_backward", {"softmax", "elementwise"})):
        assert _calls(facts, f"attention_softmax{part}", "softmax") == 12
        rows = facts["kernel_classes"][f"attention_softmax{part}"]
        assert {row["class"] for row in rows} == classes
    assert set(facts["softmax_ms"]) == set(facts["attention_matmul_ms"]) == {"forward", "backward"}
    # Softmax has few operations, but moves as many bytes as the matmuls. So its share of the time
    # is larger than its share of the operations.
    for phase, ratio in facts["softmax_over_matmul_time"].items():
        assert ratio > softmax_over_matmul_flops(phase, 64)


@pytest.mark.gpu
def test_kernel_time_is_within_the_unprofiled_clock(on_gpu):
    """Kernels cannot take longer than their phase.

    The tolerance allows for GPU clock rates that differ between profiled and unprofiled steps.
    """
    for phase, ratio in on_gpu["facts"]["kernels_over_clock"].items():
        assert 0 < ratio < 1.1, phase


@pytest.mark.gpu
@pytest.mark.parametrize(
    "given", [{"cuda_graph": True}, {"precision": "bf16", "attention": "sdpa"}]
)
def test_other_ways_to_train_are_profiled_by_phase(given):
    measured = run(params(size="small", context_length=256, batch_size=2, **given))
    check(measured)
    assert set(measured["facts"]["kernels"]) == {*PHASES, "train_step"}
