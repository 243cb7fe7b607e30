"""Tests of the data-parallel benchmark on two ranks: its facts, and errors that its check finds."""

from __future__ import annotations

import gc
import os
from functools import partial
from statistics import mean, stdev

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from systems import accounting
from systems.benchmark import ROUND, WrongOutput
from systems.benchmarks import data_parallel
from systems.benchmarks.data_parallel import BUCKETED, Params, compared_with_alone, measure, predict
from systems.check.parallel_training import TOLERANCE, check_parallel
from systems.measure.windows import failed_phase
from systems.parallel import NaiveDDP, OverlappedDDP
from systems.plot_data import read_figure
from systems.training.parallel_timing import (
    alternating_rounds,
    exposed_facts,
    step_facts,
)
from systems.training.parallel_training import ParallelTraining, rank_batch
from tests.systems.parallel.ranks import GPUS, TWO, RankContext, on_ranks
from tests.systems.training.tiny_training import PARALLEL

depends = pytest.mark.depends()


def params(strategy: str = "naive", **given) -> Params:
    buckets = {"bucket_size_mb": 0.1} if strategy in BUCKETED else {}
    return Params(**{**PARALLEL, "rounds": 3, **buckets, "strategy": strategy, **given})


def on(here: RankContext, strategy: str, **given) -> Params:
    return params(strategy, backend=here.backend, **given)


def pair(here: RankContext, point: Params, wrap) -> tuple[ParallelTraining, ParallelTraining]:
    return (
        ParallelTraining(point, here.device, here.rank, wrap),
        ParallelTraining(point, here.device, here.rank),
    )


@on_ranks(TWO, GPUS, repeats=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "strategies",
    [
        ["overlapped"],
        pytest.param(["naive", "flat", "bucketed", "peer", "torch", "torch_tuned"], marks=depends),
    ],
    ids=["overlapped", "others"],
)
def test_every_strategy_is_measured_and_leaves_a_timeline(here: RankContext, strategies, tmp_path):
    for strategy in strategies:
        os.environ["RUN_ARTIFACTS"] = str(tmp_path / strategy)
        beside = {"beside": "naive"} if strategy == "overlapped" else {}
        measured = measure(on(here, strategy, **beside), here.device)
        samples, facts = measured["samples_ms"], measured["facts"]
        assert [len(samples[name]) for name in ("train_step", "alone")] == [3, 3]
        for whole, exposed in zip(samples["communication"], samples["exposed"], strict=True):
            assert 0 <= exposed <= whole and whole > 0, strategy
        assert 0 <= facts["overlap_share"] <= 1
        assert measured["tokens"] == {"train_step": 16}
        assert set(facts["error"]) == {"loss", "gradient", "weights"}
        buckets = {"overlapped": 15, "bucketed": 6, "peer": 6}.get(strategy)
        assert facts.get("model", {}).get("buckets") == buckets
        if here.rank == 0:
            assert read_figure(tmp_path / strategy / "timeline.plot.json").rows


@on_ranks(TWO, GPUS, repeats=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "right"), [("peer", True), ("peer", False), ("torch_tuned", True)]
)
def test_master_weights_are_updated(here: RankContext, strategy, right):
    point = on(here, strategy, precision="bf16_master", optimizer="fused", lr=1e-2)
    training, alone = pair(here, point, lambda module: data_parallel.wrapped(module, point))
    if right:
        check_parallel(training, alone)
        return
    for state in training.optimizer.state.values():
        if "master" in state:  # the weights themselves start right
            state["master"].mul_(1.5)
    with pytest.raises(WrongOutput, match="weights"):
        check_parallel(training, alone)


@on_ranks(TWO, GPUS, repeats=1)
@pytest.mark.slow
def test_a_compared_training_is_left_alone_in_memory(here: RankContext):
    """So the peak memory of a step has nothing of the training without communication."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ROUND, '{"check": false}')
        training = ParallelTraining(on(here, "naive"), here.device, here.rank, NaiveDDP)
        compared_with_alone(on(here, "naive"), training)
    gc.collect()
    assert [o for o in gc.get_objects() if type(o) is ParallelTraining] == [training]


@on_ranks(TWO, GPUS, repeats=1)
def test_the_order_is_reversed_after_each_round(here: RankContext):
    both = dict(zip(("train_step", "alone"), pair(here, on(here, "naive"), NaiveDDP), strict=True))
    seen: list[str] = []
    for name, training in both.items():
        training.step = partial(seen.append, name)
    samples = alternating_rounds(both, rounds=3, steps=2)
    there, back = ["train_step"] * 2 + ["alone"] * 2, ["alone"] * 2 + ["train_step"] * 2
    assert seen == there + back + there
    assert [len(times) for times in samples.values()] == [3, 3]


@on_ranks(TWO, GPUS, repeats=1)
def test_a_failure_in_warm_up_names_its_training(here: RankContext):
    training, alone = pair(here, on(here, "naive"), NaiveDDP)
    alone.forward = partial(torch.empty, 2**60)  # more memory than there is
    with pytest.raises(RuntimeError):
        alternating_rounds({"train_step": training, "alone": alone}, 1, 1, warmup_steps=1)
    assert failed_phase() == "alone"


@on_ranks(TWO, GPUS, repeats=1)
@pytest.mark.slow
@depends
def test_torch_does_not_split_compiled_blocks(here: RankContext, tmp_path):
    """Compare the number of compiled graphs with that of a wrapper that torch does not know.

    The buckets of torch are made so small that it would split a block of the tiny model.
    """
    os.environ["RUN_ARTIFACTS"] = str(tmp_path)
    compiled = []
    for wrap in (OverlappedDDP, partial(DistributedDataParallel, bucket_cap_mb=1e-4)):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        splits = torch._dynamo.config.patch(optimize_ddp=True)  # torch's default
        with splits, pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "_DEFAULT_FIRST_BUCKET_BYTES", 100)
            patch.setattr(data_parallel, "wrapped", lambda module, _, wrap=wrap: wrap(module))
            measure(on(here, "torch", mode="compiled_blocks", rounds=1), here.device)
        compiled.append(torch._dynamo.utils.counters["aot_autograd"]["total"])
    assert compiled[0] == compiled[1] > 0


def test_each_rank_has_a_batch_of_its_own():
    cpu = torch.device("cpu")
    first, second = (rank_batch(params(), cpu, rank) for rank in (0, 1))
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[0], rank_batch(params("flat"), cpu, 0)[0])


def test_shares_of_a_step():
    samples = {
        "train_step": [11.0, 13],
        "alone": [9.0, 8],
        "communication": [4.0],
        "exposed": [3.0],
    }
    facts = step_facts([samples])
    assert (facts["train_step_ms"], facts["alone_ms"], facts["overlap_share"]) == (12, 8.5, 0.25)
    silent = step_facts([{**samples, "communication": [0.0], "exposed": [0.0]}])
    assert "overlap_share" not in silent
    unprofiled = {name: samples[name] for name in ("train_step", "alone")}
    assert step_facts([unprofiled]).keys() == {"train_step_ms", "alone_ms", "over_alone"}


def test_exposed_communication_is_the_difference_of_the_slowest_rank_in_each_round():
    """Rank 1 computes more slowly. The wait of rank 0 for it is no communication."""
    ranks = [
        {"train_step": [12.0, 14], "alone": [9.0, 9]},
        {"train_step": [12, 13], "alone": [10.0, 11]},
    ]
    facts = exposed_facts(ranks)
    assert facts["exposed_ms"] == mean([12 - 10, 14 - 11])
    assert facts["exposed_std_ms"] == stdev([2, 3])
    assert facts["communication_share"] == facts["exposed_ms"] / 13
    assert facts["alone_imbalance"] == pytest.approx(10.5 / 9 - 1)
    whole = step_facts(ranks)
    assert whole["train_step_ms"] - whole["alone_ms"] == facts["exposed_ms"]
    once = exposed_facts([{"train_step": [2.0], "alone": [1.0]}])
    assert "exposed_std_ms" not in once and once["alone_imbalance"] == 0


def test_predictions_count_the_gradients_and_their_ring():
    point = params(world_size=4)
    size = 4 * accounting.transformer_parameters(point.model_size)
    assert predict(point) == {"gradients_bytes": size, "sent_bytes": 1.5 * size}


def test_tolerances_are_for_every_precision():
    allowed = Params.model_fields["precision"].annotation.__args__
    assert set(TOLERANCE) >= set(allowed)
