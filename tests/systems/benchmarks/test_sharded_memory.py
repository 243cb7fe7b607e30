"""Tests of the benchmarks fsdp and sharded_optimizer on two ranks: memory against predictions."""

from __future__ import annotations

import os

import pytest

from systems import accounting
from systems.benchmarks import fsdp, sharded_optimizer
from systems.measure.ranks import all_gather_objects
from systems.plot_data import read_figure
from tests.systems.parallel.ranks import GPUS, TWO, RankContext, on_ranks
from tests.systems.training.tiny_training import PARALLEL

depends = pytest.mark.depends()
ON_FOUR = {**PARALLEL, "world_size": 4, "size": "small", "context_length": 128}


@on_ranks(TWO, GPUS, repeats=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        ("layers", "bf16_master"),
        pytest.param("blocks", "fp32", marks=depends),
        pytest.param("peer", "bf16_master", marks=depends),
        pytest.param("fsdp2", "bf16_master", marks=depends),
        pytest.param("fsdp2_prefetch", "fp32", marks=depends),
    ],
)
def test_fsdp_shards_the_memory_that_is_predicted(here: RankContext, strategy, precision, tmp_path):
    os.environ["RUN_ARTIFACTS"] = str(tmp_path)
    sizes = {**PARALLEL, "num_layers": 3, "vocab_size": 51, "backend": here.backend}
    optimizer = "fused" if precision == "bf16_master" else "torch"
    point = fsdp.Params(**sizes, strategy=strategy, precision=precision, optimizer=optimizer)
    measured = fsdp.measure(point, here.device)
    facts, predicted = measured["facts"], fsdp.predict(point)
    # Shards of unequal size and replicated gains of norms make a share slightly larger.
    for part in ("weights_bytes", "gradients_bytes", "optimizer_state_bytes"):
        assert 1 <= facts[part] / predicted[part] < 1.03, part
    if strategy != "peer":
        assert facts["gathers"] >= 2 * 3  # each block twice, embedding and head at least once
        assert 0 <= facts["gathers_in_time"] <= 1
        assert 3 <= facts["forward_gathers"] < facts["gathers"]
    for whole, exposed in zip(
        measured["samples_ms"]["communication"], measured["samples_ms"]["exposed"], strict=True
    ):
        assert 0 <= exposed <= whole and whole > 0
    if here.rank == 0:
        assert len(read_figure(tmp_path / "timeline.plot.json").rows) == 4  # of two ranks


def test_predictions_of_fsdp_share_the_state_and_add_activations():
    point = fsdp.Params(**ON_FOUR, strategy="blocks")
    predicted = fsdp.predict(point)
    parameters = accounting.transformer_parameters(point.model_size)
    # 4 bytes per parameter on 4 ranks
    assert predicted["weights_bytes"] == predicted["gradients_bytes"] == parameters
    assert predicted["sent_bytes"] == 3 * 0.75 * 4 * parameters
    least = predicted["weights_bytes"] + predicted["optimizer_state_bytes"]
    assert predicted["peak_memory_bytes"] > least + predicted["activations_bytes"]
    by_layer = fsdp.predict(fsdp.Params(**ON_FOUR, strategy="layers"))
    assert by_layer["peak_memory_bytes"] < predicted["peak_memory_bytes"]


@on_ranks(TWO, GPUS, repeats=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    ["sharded", *(pytest.param(x, marks=depends) for x in ("peer", "replicated", "torch_zero"))],
)
def test_a_sharded_optimizer_needs_the_memory_that_is_predicted(here: RankContext, strategy):
    point = sharded_optimizer.Params(**PARALLEL, strategy=strategy, backend=here.backend)
    measured = sharded_optimizer.measure(point, here.device)
    predicted, facts = sharded_optimizer.predict(point), measured["facts"]
    assert set(measured["samples_ms"]) == {"train_step", "alone", "optimizer"}
    assert facts["after_init"]["gradients_bytes"] == 0
    assert facts["after_init"]["optimizer_state_bytes"] == 0
    padding = 15 * 256 if strategy in ("sharded", "peer") else 0
    gradients = facts["before_step"]["gradients_bytes"] - predicted["gradients_bytes"]
    assert 0 <= gradients <= (padding if strategy == "peer" else 0)
    assert facts["before_step"]["optimizer_state_bytes"] == 0
    # The state has the moments and a step count for each of 15 parameters.
    memory, peaks = sharded_optimizer._memory(point, here.device)
    if here.device.type == "cuda":
        assert ("init" in peaks) == (strategy != "peer")  # see _memory
    shares = all_gather_objects(memory["after_step"]["optimizer_state_bytes"])
    expected = predicted["optimizer_state_bytes"] * here.world_size
    assert expected <= sum(shares) <= expected + 15 * 8 * here.world_size
    if strategy != "replicated":
        assert max(shares) < 0.6 * sum(shares)
    weights = facts["after_step"]["weights_bytes"]
    assert predicted["weights_bytes"] <= weights <= predicted["weights_bytes"] + padding
    assert ("allocated_bytes" in facts["after_step"]) == (here.device.type == "cuda")


def test_a_sharded_optimizer_sends_half_as_much_again_and_keeps_a_share_of_the_state():
    whole, shared = (
        sharded_optimizer.predict(sharded_optimizer.Params(**ON_FOUR, strategy=name))
        for name in ("replicated", "sharded")
    )
    assert shared["sent_bytes"] == 1.5 * whole["sent_bytes"]
    assert shared["optimizer_state_bytes"] == whole["optimizer_state_bytes"] / 4
    assert shared["gradients_bytes"] == whole["gradients_bytes"]
