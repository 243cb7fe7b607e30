"""Over many seeds, errors of correct code stay below half of the limits of other tests."""

from __future__ import annotations

import pytest
import torch

from systems.check.gradients import TOLERANCE, check_training
from systems.kernels.adamw import FusedAdamW
from systems.parallel import FlatDDP, ShardedOptimizer
from systems.training.training import make_training
from tests.systems.kernels.adamw_cases import USES, float64_shares
from tests.systems.margins import assert_margin
from tests.systems.parallel.parallel_models import build, share_of_tolerance, train
from tests.systems.parallel.ranks import FOUR, GPUS, TWO, RankContext, on_ranks
from tests.systems.training.tiny_training import CPU, ON_CPU, params

pytestmark = [pytest.mark.exhaustive, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("use", USES)
def test_adamw(use):
    assert_margin(lambda seed: float64_shares(use, "cpu", seed))


@pytest.mark.parametrize("precision", ON_CPU)
def test_the_check_of_a_training(precision):
    def shares_of(seed):
        errors = check_training(make_training(params(precision=precision, seed=seed), CPU))
        return {name: errors[name] / limit for name, limit in TOLERANCE[precision].items()}

    assert_margin(shares_of)


@on_ranks(TWO, FOUR, GPUS, repeats=1)
@pytest.mark.parametrize(
    ("name", "sharded"),
    [("toy", None), ("tied", None), ("transformer", None), ("tied", "torch"), ("tied", "fused")],
)
def test_data_parallel(here: RankContext, name: str, sharded: str | None) -> None:
    """Three data parallel steps have the same result as steps on whole batches in one process."""

    def shares_of(seed):
        reference = build(name, seed, here.device)
        wrapped = FlatDDP(build(name, seed, here.device))
        options = {"lr": 1e-2, "eps": 1e-2}
        kind = FusedAdamW if sharded == "fused" else torch.optim.AdamW
        theirs = kind(reference.parameters(), **options)
        ours = kind(wrapped.parameters(), **options)
        if sharded is not None:
            ours = ShardedOptimizer(wrapped.parameters(), kind, **options)
        steps = range(10 * seed, 10 * seed + 3)
        train(here, reference, theirs, name, steps)
        train(here, wrapped, ours, name, steps)
        return {"weights": share_of_tolerance(wrapped.module, reference, here.tolerance)}

    assert_margin(shares_of)
