"""Tests of the sharded_optimizer benchmark on two ranks: memory compared with predictions."""

from __future__ import annotations

import pytest

from systems.benchmarks.sharded_optimizer import Params, _memory, measure, predict
from systems.measure.ranks import all_gather_objects
from tests.systems.parallel.ranks import GPUS, TWO, RankContext, on_ranks
from tests.systems.training.tiny_training import PARALLEL


def params(strategy: str, **given) -> Params:
    return Params(**{**PARALLEL, "strategy": strategy, **given})


@on_ranks(TWO, GPUS, repeats=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        "sharded",
        pytest.param("peer", marks=pytest.mark.depends),
        pytest.param("replicated", marks=pytest.mark.depends),
        pytest.param("torch_zero", marks=pytest.mark.depends),
    ],
)
def test_memory_by_kind_is_as_predicted(here: RankContext, strategy: str) -> None:
    point = params(strategy, backend=here.backend)
    measured = measure(point, here.device)
    predicted, facts = predict(point), measured["facts"]
    assert set(measured["samples_ms"]) == {"train_step", "alone", "optimizer"}
    assert facts["after_init"]["gradients_bytes"] == 0
    assert facts["after_init"]["optimizer_state_bytes"] == 0
    padding = 15 * 256 if strategy in ("sharded", "peer") else 0
    gradients = facts["before_step"]["gradients_bytes"] - predicted["gradients_bytes"]
    assert 0 <= gradients <= (padding if strategy == "peer" else 0)
    assert facts["before_step"]["optimizer_state_bytes"] == 0
    # The state has the moments and a step count for each of 15 parameters.
    memory, _ = _memory(point, here.device)
    shares = all_gather_objects(memory["after_step"]["optimizer_state_bytes"])
    expected = predicted["optimizer_state_bytes"] * here.world_size
    assert expected <= sum(shares) <= expected + 15 * 8 * here.world_size
    if strategy != "replicated":
        assert max(shares) < 0.6 * sum(shares)
    weights = facts["after_step"]["weights_bytes"]
    assert predicted["weights_bytes"] <= weights <= predicted["weights_bytes"] + padding
    assert ("allocated_bytes" in facts["after_step"]) == (here.device.type == "cuda")


def test_sharding_sends_half_as_much_again_and_keeps_a_share_of_the_state():
    whole, shared = (predict(params(name, world_size=4)) for name in ("replicated", "sharded"))
    assert shared["sent_bytes"] == 1.5 * whole["sent_bytes"]
    assert shared["optimizer_state_bytes"] == whole["optimizer_state_bytes"] / 4
    assert shared["gradients_bytes"] == whole["gradients_bytes"]
