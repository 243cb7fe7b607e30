"""In every data-parallel benchmark, later rounds of a block are only timed, not checked again."""

from __future__ import annotations

import pytest

from systems.benchmark import ROUND
from systems.benchmarks import data_parallel, fsdp, sharded_optimizer
from tests.systems.parallel.ranks import GPUS, TWO, RankContext, on_ranks
from tests.systems.training.tiny_training import PARALLEL

# By strategy: the benchmark, what it times, and a fact that every round has
BENCHMARKS = {
    "flat": (data_parallel, {"train_step", "alone"}, "exposed_ms"),
    "blocks": (fsdp, {"train_step", "alone"}, "weights_bytes"),
    "sharded": (sharded_optimizer, {"train_step", "alone", "optimizer"}, "after_step"),
}
# Facts of the check, of the profile, and of what is computed from it
FIRST_ROUND = {"error", "model", "gathers", "profiled_exposed_ms"}


@on_ranks(TWO, GPUS, repeats=1)
@pytest.mark.parametrize("strategy", BENCHMARKS)
def test_later_rounds_of_a_block_are_only_timed(here: RankContext, strategy: str) -> None:
    benchmark, timed, fact = BENCHMARKS[strategy]
    params = benchmark.Params(**PARALLEL, strategy=strategy, backend=here.backend)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ROUND, '{"check": false}')
        measured = benchmark.measure(params, here.device)
    facts = measured["facts"]
    assert measured["samples_ms"].keys() == timed and facts.keys().isdisjoint(FIRST_ROUND)
    assert fact in facts
