"""Tests of the fsdp benchmark on two ranks: its facts, and errors that its check finds."""

from __future__ import annotations

import os

import pytest

from systems import accounting
from systems.benchmarks.fsdp import Params, measure, predict
from systems.plot_data import read_figure
from tests.systems.parallel.ranks import GPUS, TWO, RankContext, on_ranks
from tests.systems.training.tiny_training import PARALLEL


def params(strategy: str = "blocks", **given) -> Params:
    tiny = {**PARALLEL, "num_layers": 3, "vocab_size": 51}
    if given.get("precision") == "bf16_master":
        tiny["optimizer"] = "fused"
    return Params(**{**tiny, "strategy": strategy, **given})


@on_ranks(TWO, GPUS, repeats=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "precision"),
    [
        ("layers", "bf16_master"),
        pytest.param("blocks", "fp32", marks=pytest.mark.depends),
        pytest.param("peer", "bf16_master", marks=pytest.mark.depends),
        pytest.param("fsdp2", "bf16_master", marks=pytest.mark.depends),
        pytest.param("fsdp2_prefetch", "fp32", marks=pytest.mark.depends),
    ],
)
def test_every_strategy_is_measured(here: RankContext, strategy, precision, tmp_path):
    os.environ["RUN_ARTIFACTS"] = str(tmp_path)
    point = params(strategy, precision=precision, backend=here.backend)
    measured = measure(point, here.device)
    facts, predicted = measured["facts"], predict(point)
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


def test_predictions_share_the_state_and_add_activations():
    point = params(world_size=4, size="small", context_length=128)
    predicted, size = predict(point), point.model_size
    parameters = accounting.transformer_parameters(size)
    assert (
        predicted["weights_bytes"] == predicted["gradients_bytes"] == parameters
    )  # 4 bytes per parameter on 4 ranks
    assert predicted["sent_bytes"] == 3 * 0.75 * 4 * parameters
    least = predicted["weights_bytes"] + predicted["optimizer_state_bytes"]
    assert predicted["peak_memory_bytes"] > least + predicted["activations_bytes"]
    by_layer = predict(params("layers", world_size=4, size="small", context_length=128))
    assert by_layer["peak_memory_bytes"] < predicted["peak_memory_bytes"]
